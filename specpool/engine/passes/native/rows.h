/* The structs of a model and a batch, and the work on single rows: norms, rotary embedding, cache, attention, gates. */

#include "gemm.h"

/* Vectors of a head that are accumulated together, for all query heads of a KV head. */
#define WIDTH (SUMS / GROUPS == 0 ? 1 : SUMS / GROUPS < HEAD_DIM / WIDE ? SUMS / GROUPS : HEAD_DIM / WIDE)

/* Cached positions to prefetch ahead of the current one, and floats of a cache line. */
#define PREFETCHED 64
#define LINE 16

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
    Linear fc;              /* [hidden, 2 * hidden], for a state and an embedding; without panels: reads no states */
    float eps, scaling;
} Model;

typedef struct {
    int64_t rows, results, threads;
    const int64_t *token_ids, *positions, *columns; /* [rows]; the column caches the row */
    const int64_t *prefix_lengths, *offsets;        /* [rows]: later positions lie `offset` columns further right */
    const int64_t *result_rows;                     /* [results]: the rows that need logits */
    float *workspace;
    int64_t scores; /* length of a query head's scores, in each thread */
    float *logits;  /* [results, head.outputs] */
    const float *input_states; /* [rows, hidden], if the model has an fc */
    float *own_states;         /* [results, hidden]: the hidden states of the result rows before the norm, or null */
    int64_t num_state_layers;
    const int64_t *state_layers; /* [num_state_layers] numbers of layers after which to record the hidden states */
    uint16_t *states;            /* bfloat16 [rows, num_state_layers, hidden] */
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

/* Normalizes and rotates the queries and keys of a row in place, then caches its keys and values. */
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

/* Dot products of a query with `count` <= LANES keys, times `scaling`. Further lanes repeat the last key. The keys from
   `prefix` on lie `offset` floats further right. */
static INLINE void dot_scores(const float *query, const float *keys, int count, int prefix, int64_t offset,
                              float scaling, float *out) {
    for (int first = 0; first < LANES; first += WIDE) {
        wide sums[WIDE];
        for (int i = 0; i < WIDE; i++) {
            int index = first + i < count ? first + i : count - 1;
            const float *key = keys + index * HEAD_DIM + (index < prefix ? 0 : offset);
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

/* The address PREFETCHED positions after position `i` of `count`, or past the end, in `after`, which is read next. */
static INLINE const float *prefetch_at(const float *positions, int64_t i, int64_t count, const float *after) {
    i += count < PREFETCHED ? count : PREFETCHED;
    return i < count ? positions + i * HEAD_DIM : after + (i - count) * HEAD_DIM;
}

/* The mean of the values of `count` positions, weighted by their scores, for `width` vectors of a head. The values from
   `prefix` <= `count` on lie `offset` floats further right. `after`: the address to prefetch after the values. */
static INLINE void weighted_mean(int width, const float *values, int64_t count, int64_t prefix, int64_t offset,
                                 const float *scores, int64_t stride, const float *total, const float *after,
                                 float *out) {
    wide sums[GROUPS][WIDTH];
    for (int g = 0; g < GROUPS; g++)
        for (int v = 0; v < width; v++) sums[g][v] = (wide){0};
    for (int64_t i = 0, end = prefix; i < count; end = count, values += offset)
        for (; i < end; i++) {
            const float *fetched = prefetch_at(values, i, count, after);
            for (int v = 0; v < width * WIDE; v += LINE) __builtin_prefetch(fetched + v, 0, 2);
            for (int g = 0; g < GROUPS; g++)
                for (int v = 0; v < width; v++) sums[g][v] += at(values + i * HEAD_DIM, v) * scores[g * stride + i];
        }
    for (int g = 0; g < GROUPS; g++)
        for (int v = 0; v < width; v++) put(out + g * HEAD_DIM, v, sums[g][v] / total[g]);
}

/* Attention of the query heads of one KV head over `count` cached positions. Those from `prefix` <= `count` on lie
   `offset` floats further right. `scores`: [GROUPS, stride] floats. `after`: the keys that this thread probably reads
   next. */
static void attend(const float *query, const float *keys, const float *values, int64_t count, int64_t prefix,
                   int64_t offset, float scaling, float *scores, int64_t stride, const float *after, float *out) {
    int64_t rest = count % LANES, whole = count - rest, blocks = whole + (rest ? LANES : 0);
    for (int64_t i = 0; i < blocks; i += LANES) {
        const float *block = keys + i * HEAD_DIM, *fetched = prefetch_at(keys, i, blocks, values);
        int ends = i < prefix && prefix < i + LANES, inside = ends ? prefix - i : LANES; /* keys of the prefix */
        if (i >= prefix) block += offset;
        for (int k = 0; k < LANES * HEAD_DIM; k += LINE) __builtin_prefetch(fetched + k, 0, 2);
        for (int g = 0; g < GROUPS; g++) {
            const float *head = query + g * HEAD_DIM;
            float *to = scores + g * stride + i;
            if (i < whole && !ends) dot_scores(head, block, LANES, LANES, 0, scaling, to);
            else dot_scores(head, block, i < whole ? LANES : rest, inside, offset, scaling, to);
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
        weighted_mean(WIDTH, values + done, count, prefix, offset, scores, stride, total, after + done, out + done);
    if (HEAD_DIM / WIDE % WIDTH)
        weighted_mean(HEAD_DIM / WIDE % WIDTH, values + done, count, prefix, offset, scores, stride, total,
                      after + done, out + done);
}

/* silu(gate) * up */
static void gate(const float *gate_up, int64_t size, float *out) {
    for (int64_t i = 0; i < size; i += WIDE) {
        wide x = at(gate_up + i, 0);
        put(out + i, 0, x / (1.0f + exponential((wide){0} - x)) * at(gate_up + size + i, 0));
    }
}
