/* One forward pass of a Llama-like decoder over packed rows, in float32, on OpenMP threads. Weights take as few bits as
   represent them exactly (panels.h), because a step of few rows takes as long as reading them.

   The pass is batch-invariant by construction. GEMM adds the terms of each output in order, with one vector lane per
   output, and everything else works on one row alone. So no shape needs padding.

   Compile-time constants: HEAD_DIM (a multiple of LANES), GROUPS (query heads per KV head) and KINDS (of the weights).
   structs.py mirrors the structs. */

#include "gemm.h"

/* Vectors of a head that are accumulated together, for all query heads of a KV head. */
#define WIDTH (SUMS / GROUPS == 0 ? 1 : SUMS / GROUPS < HEAD_DIM / WIDE ? SUMS / GROUPS : HEAD_DIM / WIDE)

/* Cached positions to prefetch ahead of the current one, and floats of a cache line. */
#define PREFETCHED 64
#define LINE 16

/* Seconds that thread 0 has spent in each stage since the library was loaded. */
enum { GEMM, ATTENTION, ROWS };
#ifdef MEASURED
extern double omp_get_wtime(void);
double stage_seconds[ROWS + 1];
static double last_end;
#define END_OF(stage)                                                \
    if (omp_get_thread_num() == 0) {                                 \
        double now = omp_get_wtime();                                \
        if (stage >= 0) stage_seconds[stage] += now - last_end;      \
        last_end = now;                                              \
    }
#else
#define END_OF(stage)
#endif

typedef struct {
    Linear query_key_value, out, gate_up, down;
    const float *before_attention, *before_mlp; /* norm weights, [hidden] */
    const float *after_attention, *after_mlp;   /* norm weights, [hidden], or null */
    const float *head_norms;                    /* [heads + kv_heads, HEAD_DIM], or null */
    float *keys, *values;                        /* [kv_heads, columns, HEAD_DIM] */
} Layer;

typedef struct {
    const Layer *layers;
    int64_t num_layers, hidden, intermediate, kv_heads, columns;
    const float *cosines, *sines; /* [positions, HEAD_DIM]; sines of the first half of a head negated */
    const float *norm;
    Linear embedding, head; /* [vocabulary, hidden]; a tied head has the panels of the embedding */
    float eps, scaling;
} Model;

typedef struct {
    int64_t rows, results, threads;
    const int64_t *token_ids, *positions, *columns; /* [rows]; the column caches the row */
    const int64_t *result_rows;                     /* [results]: the rows that need logits */
    float *workspace;
    int64_t scores; /* length of a query head's scores, in each thread */
    float *logits;  /* [results, head.outputs] */
} Batch;

#define HEADS(model) (GROUPS * (model)->kv_heads)

/* --- One row */

/* x / rms(x) * weight, of `size` features; `out` may be `x`. */
static void rms_norm(const float *x, const float *weight, int64_t size, float eps, float *out) {
    wide squares[SLICES] = {{0}};
    for (int64_t i = 0; i < size; i += LANES)
        for (int s = 0; s < SLICES; s++) squares[s] += at(x + i, s) * at(x + i, s);
    float scale = 1.0f / sqrtf(folded(squares, 0) / size + eps);
    for (int64_t i = 0; i < size; i += WIDE) put(out + i, 0, at(x + i, 0) * scale * at(weight + i, 0));
}

static void rotate(const float *cosines, const float *sines, float *head) {
    for (int i = 0; i < HEAD_DIM / 2; i++) {
        float first = head[i], second = head[i + HEAD_DIM / 2];
        head[i] = first * cosines[i] + second * sines[i];
        head[i + HEAD_DIM / 2] = second * cosines[i + HEAD_DIM / 2] + first * sines[i + HEAD_DIM / 2];
    }
}

/* Normalizes and rotates the queries and keys of a row in place, then caches weights keys and values. */
static void cache(const Model *model, const Layer *layer, const Batch *batch, int64_t row, float *heads) {
    int64_t rotated = HEADS(model) + model->kv_heads;
    int64_t position = batch->positions[row] * HEAD_DIM;
    for (int64_t h = 0; h < rotated; h++) {
        float *head = heads + h * HEAD_DIM;
        if (layer->head_norms) rms_norm(head, layer->head_norms + h * HEAD_DIM, HEAD_DIM, model->eps, head);
        rotate(model->cosines + position, model->sines + position, head);
    }
    const float *key = heads + HEADS(model) * HEAD_DIM, *value = heads + rotated * HEAD_DIM;
    for (int64_t h = 0; h < model->kv_heads; h++) {
        int64_t to = (h * model->columns + batch->columns[row]) * HEAD_DIM;
        for (int i = 0; i < HEAD_DIM; i += WIDE) {
            put(layer->keys + to + i, 0, at(key + h * HEAD_DIM + i, 0));
            put(layer->values + to + i, 0, at(value + h * HEAD_DIM + i, 0));
        }
    }
}

/* Dot products of a query with `count` <= LANES keys, times `scaling`. Further lanes repeat the last key. */
static INLINE void dot_scores(const float *query, const float *keys, int count, float scaling, float *out) {
    for (int first = 0; first < LANES; first += WIDE) {
        wide sums[WIDE];
        for (int i = 0; i < WIDE; i++) {
            const float *key = keys + (first + i < count ? first + i : count - 1) * HEAD_DIM;
            wide slices[SLICES];
            for (int s = 0; s < SLICES; s++) slices[s] = at(query, s) * at(key, s);
            for (int k = LANES; k < HEAD_DIM; k += LANES)
                for (int s = 0; s < SLICES; s++) slices[s] += at(query + k, s) * at(key + k, s);
            for (int half = SLICES / 2; half; half /= 2)
                for (int s = 0; s < half; s++) slices[s] += slices[s + half];
            sums[i] = slices[0];
        }
#if WIDE > 8
        for (int i = 0; i < 8; i++) sums[i] = FOLDED(sums[i], sums[i + 8], 8);
#endif
#if WIDE > 4
        for (int i = 0; i < 4; i++) sums[i] = FOLDED(sums[i], sums[i + 4], 4);
#endif
        for (int i = 0; i < 2; i++) sums[i] = FOLDED(sums[i], sums[i + 2], 2);
        put(out + first, 0, FOLDED(sums[0], sums[1], 1) * scaling);
    }
}

/* The address PREFETCHED positions after position `i` of `count`, or within `after`, which is read next. */
static INLINE const float *prefetch_at(const float *positions, int64_t i, int64_t count, const float *after) {
    i += count < PREFETCHED ? count : PREFETCHED;
    return i < count ? positions + i * HEAD_DIM : after + (i - count) * HEAD_DIM;
}

/* The mean of the values of `count` positions, weighted by their scores, for `width` vectors of a head. `after`: the
   address to prefetch after the values. */
static INLINE void weighted_mean(int width, const float *values, int64_t count, const float *scores, int64_t stride,
                         const float *total, const float *after, float *out) {
    wide sums[GROUPS][WIDTH];
    for (int g = 0; g < GROUPS; g++)
        for (int v = 0; v < width; v++) sums[g][v] = (wide){0};
    for (int64_t i = 0; i < count; i++) {
        const float *fetched = prefetch_at(values, i, count, after);
        for (int v = 0; v < width * WIDE; v += LINE) __builtin_prefetch(fetched + v, 0, 2);
        for (int g = 0; g < GROUPS; g++)
            for (int v = 0; v < width; v++) sums[g][v] += at(values + i * HEAD_DIM, v) * scores[g * stride + i];
    }
    for (int g = 0; g < GROUPS; g++)
        for (int v = 0; v < width; v++) put(out + g * HEAD_DIM, v, sums[g][v] / total[g]);
}

/* Attention of the query heads of one KV head over `count` cached positions. `scores`: [GROUPS, stride] floats. `after`:
   the keys that this thread probably reads next. */
static void attend(const float *query, const float *keys, const float *values, int64_t count, float scaling,
                   float *scores, int64_t stride, const float *after, float *out) {
    int64_t rest = count % LANES, whole = count - rest, blocks = whole + (rest ? LANES : 0);
    for (int64_t i = 0; i < blocks; i += LANES) {
        const float *block = keys + i * HEAD_DIM, *fetched = prefetch_at(keys, i, blocks, values);
        for (int k = 0; k < LANES * HEAD_DIM; k += LINE) __builtin_prefetch(fetched + k, 0, 2);
        for (int g = 0; g < GROUPS; g++) {
            const float *head = query + g * HEAD_DIM;
            if (i < whole) dot_scores(head, block, LANES, scaling, scores + g * stride + i);
            else dot_scores(head, block, rest, scaling, scores + g * stride + i);
        }
    }
    float total[GROUPS];
    for (int g = 0; g < GROUPS; g++) {
        float *weights = scores + g * stride;
        for (int64_t i = count; i < blocks; i++) weights[i] = -INFINITY;
        wide peaks[SLICES], sum[SLICES] = {{0}};
        for (int s = 0; s < SLICES; s++) peaks[s] = at(weights, s);
        for (int64_t i = LANES; i < count; i += LANES)
            for (int s = 0; s < SLICES; s++) peaks[s] = larger(peaks[s], at(weights + i, s));
        float largest = folded(peaks, 1);
        for (int64_t i = 0; i < count; i += LANES) {
            for (int s = 0; s < SLICES; s++) put(weights + i, s, exponential(at(weights + i, s) - largest));
            /* exp() of the padding is tiny but not zero. */
            if (i + LANES > count)
                for (int64_t k = count; k < i + LANES; k++) weights[k] = 0;
            for (int s = 0; s < SLICES; s++) sum[s] += at(weights + i, s);
        }
        total[g] = folded(sum, 0);
    }
    int64_t done = 0;
    for (; done + WIDTH * WIDE <= HEAD_DIM; done += WIDTH * WIDE)
        weighted_mean(WIDTH, values + done, count, scores, stride, total, after + done, out + done);
    if (HEAD_DIM / WIDE % WIDTH)
        weighted_mean(HEAD_DIM / WIDE % WIDTH, values + done, count, scores, stride, total, after + done, out + done);
}

/* silu(gate) * up */
static void gate(const float *gate_up, int64_t size, float *out) {
    for (int64_t i = 0; i < size; i += WIDE) {
        wide x = at(gate_up + i, 0);
        put(out + i, 0, x / (1.0f + exponential((wide){0} - x)) * at(gate_up + size + i, 0));
    }
}

/* --- The stages of a pass. `forward` runs them all in one parallel region; the ranks of a sharded model run them one by
   one and exchange results in between. Each stage is compiled once, so both give the same bits. */

/* Activations of a pass, each [rows, ...]. */
typedef struct {
    float *hidden, *normed, *heads, *attended, *branch, *gate_up, *gated, *scores;
} Activations;

static int64_t attended_stride(const Model *model) { return HEADS(model) * HEAD_DIM; }

/* Floats of workspace for the activations, without the scores of the threads. */
int64_t workspace_floats(const Model *model, int64_t rows) {
    const Layer *layer = model->layers;
    int64_t per_row = 2 * model->hidden + layer->query_key_value.outputs + attended_stride(model) +
                      layer->out.outputs + layer->gate_up.outputs + model->intermediate;
    return rows * per_row;
}

Activations activations_of(const Model *model, const Batch *batch) {
    const Layer *layer = model->layers;
    Activations acts;
    acts.hidden = batch->workspace;
    acts.normed = acts.hidden + batch->rows * model->hidden;
    acts.heads = acts.normed + batch->rows * model->hidden;
    acts.attended = acts.heads + batch->rows * layer->query_key_value.outputs;
    acts.branch = acts.attended + batch->rows * attended_stride(model);
    acts.gate_up = acts.branch + batch->rows * layer->out.outputs;
    acts.gated = acts.gate_up + batch->rows * layer->gate_up.outputs;
    acts.scores = acts.gated + batch->rows * model->intermediate;
    return acts;
}

static ONE_COPY void embed_rows(const Model *model, const Batch *batch, float *hidden) {
#pragma omp for
    for (int64_t row = 0; row < batch->rows; row++)
        embedding_row(&model->embedding, batch->token_ids[row], hidden + row * model->hidden);
}

/* hidden += norm(branch) */
static ONE_COPY void add(const Model *model, int64_t rows, const float *norm, float *branch, int64_t stride,
                         float *hidden) {
#pragma omp for
    for (int64_t row = 0; row < rows; row++) {
        float *from = branch + row * stride, *to = hidden + row * model->hidden;
        if (norm) rms_norm(from, norm, model->hidden, model->eps, from);
        for (int64_t i = 0; i < model->hidden; i += WIDE) put(to + i, 0, at(to + i, 0) + at(from + i, 0));
    }
    END_OF(ROWS)
}

static ONE_COPY void rms_norm_rows(const Model *model, const float *norm, int64_t rows, const int64_t *chosen,
                                    const float *hidden, float *out) {
#pragma omp for
    for (int64_t row = 0; row < rows; row++)
        rms_norm(hidden + (chosen ? chosen[row] : row) * model->hidden, norm, model->hidden, model->eps,
                  out + row * model->hidden);
    END_OF(ROWS)
}

/* Offset, in floats, of the first key and value of a task. Task head * rows + row is one row of one KV head. */
static int64_t first_of_task(const Model *model, const Batch *batch, int64_t task) {
    int64_t head = task / batch->rows, row = task % batch->rows;
    return (head * model->columns + batch->columns[row] - batch->positions[row]) * HEAD_DIM;
}

/* Caches the keys and values of all rows, then attends. Result: `attended`. */
static ONE_COPY void attend_rows(const Model *model, const Layer *layer, const Batch *batch, const Activations *acts) {
    int64_t rows = batch->rows, heads_stride = layer->query_key_value.outputs, stride = attended_stride(model);
    rms_norm_rows(model, layer->before_attention, rows, 0, acts->hidden, acts->normed);
    gemm(&layer->query_key_value, rows, acts->normed, acts->heads);
    END_OF(GEMM)
#pragma omp for
    for (int64_t row = 0; row < rows; row++) cache(model, layer, batch, row, acts->heads + row * heads_stride);
    END_OF(ROWS)
    int64_t tasks = rows * model->kv_heads, threads = omp_get_num_threads();
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t head = task / rows, row = task % rows, first = first_of_task(model, batch, task);
        /* Threads take tasks roughly in turn. */
        int64_t after = first_of_task(model, batch, task + threads < tasks ? task + threads : task);
        attend(acts->heads + row * heads_stride + head * GROUPS * HEAD_DIM, layer->keys + first, layer->values + first,
               batch->positions[row] + 1, model->scaling,
               acts->scores + omp_get_thread_num() * GROUPS * batch->scores, batch->scores, layer->keys + after,
               acts->attended + row * stride + head * GROUPS * HEAD_DIM);
    }
    END_OF(ATTENTION)
}

static ONE_COPY void gate_rows(const Model *model, const Layer *layer, const Batch *batch, const Activations *acts) {
    int64_t stride = layer->gate_up.outputs, size = model->intermediate;
    rms_norm_rows(model, layer->before_mlp, batch->rows, 0, acts->hidden, acts->normed);
    gemm(&layer->gate_up, batch->rows, acts->normed, acts->gate_up);
    END_OF(GEMM)
#pragma omp for
    for (int64_t row = 0; row < batch->rows; row++)
        gate(acts->gate_up + row * stride, size, acts->gated + row * size);
    END_OF(ROWS)
}

/* The branch to add to the hidden states: out [rows, outputs] = W x. */
static ONE_COPY void branch_rows(const Linear *linear, const Batch *batch, const float *x, float *out) {
    gemm(linear, batch->rows, x, out);
    END_OF(GEMM)
}

static ONE_COPY void logits_rows(const Model *model, const Batch *batch, const Activations *acts) {
    rms_norm_rows(model, model->norm, batch->results, batch->result_rows, acts->hidden, acts->normed);
    gemm(&model->head, batch->results, acts->normed, batch->logits);
    END_OF(GEMM)
}

/* Runs a whole pass: caches the keys and values of all rows and computes the logits of the result rows. */
void forward(const Model *model, const Batch *batch) {
    const Activations acts = activations_of(model, batch);
    int64_t rows = batch->rows, stride = model->layers->out.outputs;
#pragma omp parallel num_threads(batch->threads)
    {
        END_OF(-1)
        embed_rows(model, batch, acts.hidden);
        for (const Layer *layer = model->layers; layer < model->layers + model->num_layers; layer++) {
            attend_rows(model, layer, batch, &acts);
            branch_rows(&layer->out, batch, acts.attended, acts.branch);
            add(model, rows, layer->after_attention, acts.branch, stride, acts.hidden);
            gate_rows(model, layer, batch, &acts);
            branch_rows(&layer->down, batch, acts.gated, acts.branch);
            add(model, rows, layer->after_mlp, acts.branch, stride, acts.hidden);
        }
        logits_rows(model, batch, &acts);
    }
}

/* --- The same stages, each in weights own parallel region. */

void embed_stage(const Model *model, const Batch *batch, float *out) {
#pragma omp parallel num_threads(batch->threads)
    embed_rows(model, batch, out);
}

/* Adds the branch of the layer before, [rows, hidden] or null, then attends. Result: `attended`. */
void attend_stage(const Model *model, const Batch *batch, int64_t index, float *branch) {
    const Activations acts = activations_of(model, batch);
    const Layer *layer = model->layers + index;
#pragma omp parallel num_threads(batch->threads)
    {
        if (branch) add(model, batch->rows, layer[-1].after_mlp, branch, model->hidden, acts.hidden);
        attend_rows(model, layer, batch, &acts);
    }
}

/* Adds the attention branch, [rows, hidden], then runs gate and up. Result: `gated`. */
void gate_stage(const Model *model, const Batch *batch, int64_t index, float *branch) {
    const Activations acts = activations_of(model, batch);
    const Layer *layer = model->layers + index;
#pragma omp parallel num_threads(batch->threads)
    {
        add(model, batch->rows, layer->after_attention, branch, model->hidden, acts.hidden);
        gate_rows(model, layer, batch, &acts);
    }
}

/* Adds the last branch, [rows, hidden], then computes the logits of the result rows. */
void logits_stage(const Model *model, const Batch *batch, float *branch) {
    const Activations acts = activations_of(model, batch);
    const Layer *last = model->layers + model->num_layers - 1;
#pragma omp parallel num_threads(batch->threads)
    {
        add(model, batch->rows, last->after_mlp, branch, model->hidden, acts.hidden);
        logits_rows(model, batch, &acts);
    }
}

/* A single GEMM. */
void run_gemm(const Linear *linear, int64_t rows, int64_t threads, const float *x, float *out) {
#pragma omp parallel num_threads(threads)
    gemm(linear, rows, x, out);
}
