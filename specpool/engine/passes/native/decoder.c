/* One forward pass of a Llama-like decoder over packed rows, in float32, on OpenMP threads. Weights are kept in as few
   bits as lose nothing (panels.h): a step of few rows takes as long as reading them.

   The computation for a row does not depend on which other rows there are: a product adds its terms in their order,
   with one vector lane per output, and everything else works on one row alone. So rows have the same bits in every
   batch by construction, and no shape needs padding.

   HEAD_DIM (a multiple of LANES), GROUPS (query heads per KV head) and KINDS (those of the weights) are known at compile
   time. The structures are mirrored in structures.py. */

#include "products.h"

/* Vectors of a head that are summed at the same time, for all query heads of a KV head. */
#define WIDTH (SUMS / GROUPS == 0 ? 1 : SUMS / GROUPS < HEAD_DIM / WIDE ? SUMS / GROUPS : HEAD_DIM / WIDE)

/* Cached positions ahead of the one in use that are fetched from memory, and floats of a cache line. */
#define SOON 64
#define LINE 16

/* Seconds that the first thread has spent in each stage since the library was loaded, measured from end to end. */
enum { PRODUCTS, ATTENTION, ROWS };
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
    const float *before_attention, *before_mlp; /* weights of norms, [hidden] */
    const float *after_attention, *after_mlp;   /* weights of norms, [hidden], or null */
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
    const int64_t *token_ids, *positions, *columns; /* [rows]; the row's position is cached in its column */
    const int64_t *result_rows;                     /* [results]: the rows whose logits are wanted */
    float *workspace;
    int64_t scores; /* floats per query head in a thread's scores */
    float *logits;  /* [results, head.outputs] */
} Batch;

#define HEADS(model) (GROUPS * (model)->kv_heads)

/* --- One row */

/* x / rms(x) * weight, of `size` features; `out` may be `x`. */
static void normalise(const float *x, const float *weight, int64_t size, float eps, float *out) {
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

/* Normalises and rotates the queries and keys of a row in place, and caches its keys and values. */
static void cache(const Model *model, const Layer *layer, const Batch *batch, int64_t row, float *heads) {
    int64_t rotated = HEADS(model) + model->kv_heads;
    int64_t position = batch->positions[row] * HEAD_DIM;
    for (int64_t h = 0; h < rotated; h++) {
        float *head = heads + h * HEAD_DIM;
        if (layer->head_norms) normalise(head, layer->head_norms + h * HEAD_DIM, HEAD_DIM, model->eps, head);
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

/* The dot products of a query with `count` keys, at most LANES, times `scaling`; beyond them that with the last key. */
static INLINE void score(const float *query, const float *keys, int count, float scaling, float *out) {
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

/* What is read SOON positions, or as many as there are, after position `i` of `count`: `after` follows upon them. */
static INLINE const float *soon(const float *positions, int64_t i, int64_t count, const float *after) {
    i += count < SOON ? count : SOON;
    return i < count ? positions + i * HEAD_DIM : after + (i - count) * HEAD_DIM;
}

/* The mean of the values of `count` positions, weighted by their scores, for `width` vectors of a head. `after`: what is
   read after the values. */
static INLINE void weigh(int width, const float *values, int64_t count, const float *scores, int64_t stride,
                         const float *total, const float *after, float *out) {
    wide sums[GROUPS][WIDTH];
    for (int g = 0; g < GROUPS; g++)
        for (int v = 0; v < width; v++) sums[g][v] = (wide){0};
    for (int64_t i = 0; i < count; i++) {
        const float *fetched = soon(values, i, count, after);
        for (int v = 0; v < width * WIDE; v += LINE) __builtin_prefetch(fetched + v, 0, 2);
        for (int g = 0; g < GROUPS; g++)
            for (int v = 0; v < width; v++) sums[g][v] += at(values + i * HEAD_DIM, v) * scores[g * stride + i];
    }
    for (int g = 0; g < GROUPS; g++)
        for (int v = 0; v < width; v++) put(out + g * HEAD_DIM, v, sums[g][v] / total[g]);
}

/* Attention of the query heads of one KV head over `count` cached positions. `scores`: [GROUPS, stride] floats. `after`:
   the keys that this thread is likely to read next. */
static void attend(const float *query, const float *keys, const float *values, int64_t count, float scaling,
                   float *scores, int64_t stride, const float *after, float *out) {
    int64_t rest = count % LANES, whole = count - rest, blocks = whole + (rest ? LANES : 0);
    for (int64_t i = 0; i < blocks; i += LANES) {
        const float *block = keys + i * HEAD_DIM, *fetched = soon(keys, i, blocks, values);
        for (int k = 0; k < LANES * HEAD_DIM; k += LINE) __builtin_prefetch(fetched + k, 0, 2);
        for (int g = 0; g < GROUPS; g++) {
            const float *its = query + g * HEAD_DIM;
            if (i < whole) score(its, block, LANES, scaling, scores + g * stride + i);
            else score(its, block, rest, scaling, scores + g * stride + i);
        }
    }
    float total[GROUPS];
    for (int g = 0; g < GROUPS; g++) {
        float *its = scores + g * stride;
        for (int64_t i = count; i < blocks; i++) its[i] = -INFINITY;
        wide most[SLICES], sum[SLICES] = {{0}};
        for (int s = 0; s < SLICES; s++) most[s] = at(its, s);
        for (int64_t i = LANES; i < count; i += LANES)
            for (int s = 0; s < SLICES; s++) most[s] = larger(most[s], at(its + i, s));
        float largest = folded(most, 1);
        for (int64_t i = 0; i < count; i += LANES) {
            for (int s = 0; s < SLICES; s++) put(its + i, s, exponential(at(its + i, s) - largest));
            /* Beyond `count` the weights are tiny, but not zero. */
            if (i + LANES > count)
                for (int64_t k = count; k < i + LANES; k++) its[k] = 0;
            for (int s = 0; s < SLICES; s++) sum[s] += at(its + i, s);
        }
        total[g] = folded(sum, 0);
    }
    int64_t done = 0;
    for (; done + WIDTH * WIDE <= HEAD_DIM; done += WIDTH * WIDE)
        weigh(WIDTH, values + done, count, scores, stride, total, after + done, out + done);
    if (HEAD_DIM / WIDE % WIDTH)
        weigh(HEAD_DIM / WIDE % WIDTH, values + done, count, scores, stride, total, after + done, out + done);
}

/* silu(gate) * up */
static void gate(const float *gate_up, int64_t size, float *out) {
    for (int64_t i = 0; i < size; i += WIDE) {
        wide x = at(gate_up + i, 0);
        put(out + i, 0, x / (1.0f + exponential((wide){0} - x)) * at(gate_up + size + i, 0));
    }
}

/* --- The pass, in parts: a whole one runs them all in one parallel region. The ranks of a divided model run part after
   part, and exchange results in between. Parts are compiled once, so that both ways have the same bits. */

/* Where a pass keeps its numbers: [rows, ...] each. */
typedef struct {
    float *hidden, *normed, *heads, *attended, *branch, *gate_up, *gated, *scores;
} Space;

static int64_t attended_stride(const Model *model) { return HEADS(model) * HEAD_DIM; }

/* Floats of workspace that `forward` needs besides the scores of its threads. */
int64_t workspace_floats(const Model *model, int64_t rows) {
    const Layer *layer = model->layers;
    int64_t per_row = 2 * model->hidden + layer->query_key_value.outputs + attended_stride(model) +
                      layer->out.outputs + layer->gate_up.outputs + model->intermediate;
    return rows * per_row;
}

Space space_of(const Model *model, const Batch *batch) {
    const Layer *layer = model->layers;
    Space space;
    space.hidden = batch->workspace;
    space.normed = space.hidden + batch->rows * model->hidden;
    space.heads = space.normed + batch->rows * model->hidden;
    space.attended = space.heads + batch->rows * layer->query_key_value.outputs;
    space.branch = space.attended + batch->rows * attended_stride(model);
    space.gate_up = space.branch + batch->rows * layer->out.outputs;
    space.gated = space.gate_up + batch->rows * layer->gate_up.outputs;
    space.scores = space.gated + batch->rows * model->intermediate;
    return space;
}

static ONE_COPY void embed_rows(const Model *model, const Batch *batch, float *hidden) {
#pragma omp for
    for (int64_t row = 0; row < batch->rows; row++)
        one_output(&model->embedding, batch->token_ids[row], hidden + row * model->hidden);
}

/* hidden += norm(branch), for all rows. */
static ONE_COPY void add(const Model *model, int64_t rows, const float *norm, float *branch, int64_t stride,
                         float *hidden) {
#pragma omp for
    for (int64_t row = 0; row < rows; row++) {
        float *from = branch + row * stride, *to = hidden + row * model->hidden;
        if (norm) normalise(from, norm, model->hidden, model->eps, from);
        for (int64_t i = 0; i < model->hidden; i += WIDE) put(to + i, 0, at(to + i, 0) + at(from + i, 0));
    }
    END_OF(ROWS)
}

static ONE_COPY void normalise_rows(const Model *model, const float *norm, int64_t rows, const int64_t *chosen,
                                    const float *hidden, float *out) {
#pragma omp for
    for (int64_t row = 0; row < rows; row++)
        normalise(hidden + (chosen ? chosen[row] : row) * model->hidden, norm, model->hidden, model->eps,
                  out + row * model->hidden);
    END_OF(ROWS)
}

/* Where the keys and values begin, in floats, that the queries of a KV head and a row see: task head * rows + row. */
static int64_t first_of_task(const Model *model, const Batch *batch, int64_t task) {
    int64_t head = task / batch->rows, row = task % batch->rows;
    return (head * model->columns + batch->columns[row] - batch->positions[row]) * HEAD_DIM;
}

/* Caches the keys and values of all rows. `attended`: what their queries find. */
static ONE_COPY void attend_rows(const Model *model, const Layer *layer, const Batch *batch, const Space *space) {
    int64_t rows = batch->rows, heads_stride = layer->query_key_value.outputs, stride = attended_stride(model);
    normalise_rows(model, layer->before_attention, rows, 0, space->hidden, space->normed);
    apply(&layer->query_key_value, rows, space->normed, space->heads);
    END_OF(PRODUCTS)
#pragma omp for
    for (int64_t row = 0; row < rows; row++) cache(model, layer, batch, row, space->heads + row * heads_stride);
    END_OF(ROWS)
    int64_t tasks = rows * model->kv_heads, threads = omp_get_num_threads();
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t head = task / rows, row = task % rows, first = first_of_task(model, batch, task);
        /* Threads take tasks in turn, more or less. */
        int64_t after = first_of_task(model, batch, task + threads < tasks ? task + threads : task);
        attend(space->heads + row * heads_stride + head * GROUPS * HEAD_DIM, layer->keys + first, layer->values + first,
               batch->positions[row] + 1, model->scaling,
               space->scores + omp_get_thread_num() * GROUPS * batch->scores, batch->scores, layer->keys + after,
               space->attended + row * stride + head * GROUPS * HEAD_DIM);
    }
    END_OF(ATTENTION)
}

static ONE_COPY void activate_rows(const Model *model, const Layer *layer, const Batch *batch, const Space *space) {
    int64_t stride = layer->gate_up.outputs, size = model->intermediate;
    normalise_rows(model, layer->before_mlp, batch->rows, 0, space->hidden, space->normed);
    apply(&layer->gate_up, batch->rows, space->normed, space->gate_up);
    END_OF(PRODUCTS)
#pragma omp for
    for (int64_t row = 0; row < batch->rows; row++)
        gate(space->gate_up + row * stride, size, space->gated + row * size);
    END_OF(ROWS)
}

/* out [rows, outputs] = the product of x, which is added to the hidden states. */
static ONE_COPY void branch_of(const Linear *linear, const Batch *batch, const float *x, float *out) {
    apply(linear, batch->rows, x, out);
    END_OF(PRODUCTS)
}

static ONE_COPY void judge_rows(const Model *model, const Batch *batch, const Space *space) {
    normalise_rows(model, model->norm, batch->results, batch->result_rows, space->hidden, space->normed);
    apply(&model->head, batch->results, space->normed, batch->logits);
    END_OF(PRODUCTS)
}

/* Caches the keys and values of all rows, and computes the logits of the result rows. */
void forward(const Model *model, const Batch *batch) {
    const Space space = space_of(model, batch);
    int64_t rows = batch->rows, stride = model->layers->out.outputs;
#pragma omp parallel num_threads(batch->threads)
    {
        END_OF(-1)
        embed_rows(model, batch, space.hidden);
        for (const Layer *layer = model->layers; layer < model->layers + model->num_layers; layer++) {
            attend_rows(model, layer, batch, &space);
            branch_of(&layer->out, batch, space.attended, space.branch);
            add(model, rows, layer->after_attention, space.branch, stride, space.hidden);
            activate_rows(model, layer, batch, &space);
            branch_of(&layer->down, batch, space.gated, space.branch);
            add(model, rows, layer->after_mlp, space.branch, stride, space.hidden);
        }
        judge_rows(model, batch, &space);
    }
}

/* --- The same parts, each in a parallel region of its own. */

void embed_part(const Model *model, const Batch *batch, float *out) {
#pragma omp parallel num_threads(batch->threads)
    embed_rows(model, batch, out);
}

/* Adds the branch of the layer before, [rows, hidden], if there is one, and attends: `attended` of the space. */
void attend_part(const Model *model, const Batch *batch, int64_t index, float *branch) {
    const Space space = space_of(model, batch);
    const Layer *layer = model->layers + index;
#pragma omp parallel num_threads(batch->threads)
    {
        if (branch) add(model, batch->rows, layer[-1].after_mlp, branch, model->hidden, space.hidden);
        attend_rows(model, layer, batch, &space);
    }
}

/* Adds the branch of attention, [rows, hidden], and activates: `gated` of the space. */
void activate_part(const Model *model, const Batch *batch, int64_t index, float *branch) {
    const Space space = space_of(model, batch);
    const Layer *layer = model->layers + index;
#pragma omp parallel num_threads(batch->threads)
    {
        add(model, batch->rows, layer->after_attention, branch, model->hidden, space.hidden);
        activate_rows(model, layer, batch, &space);
    }
}

/* Adds the branch of the last layer, [rows, hidden], and computes the logits of the result rows. */
void judge_part(const Model *model, const Batch *batch, float *branch) {
    const Space space = space_of(model, batch);
    const Layer *last = model->layers + model->num_layers - 1;
#pragma omp parallel num_threads(batch->threads)
    {
        add(model, batch->rows, last->after_mlp, branch, model->hidden, space.hidden);
        judge_rows(model, batch, &space);
    }
}

/* One product on its own. */
void multiply(const Linear *linear, int64_t rows, int64_t threads, const float *x, float *out) {
#pragma omp parallel num_threads(threads)
    apply(linear, rows, x, out);
}
