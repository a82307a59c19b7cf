/* The structs of a model and a batch, and the work on single rows: norms, rotary embedding, cache, attention, gates. */

#include "gemm.h"
#include "segment.h"

/* Kinds of stages. Recurrences count as attention. */
enum { GEMM, ATTENTION, ROWS };

/* Minimum number of rows that a thread claims: moving fewer to another core takes longer than computing them. */
#define ROW_GRAIN 4

/* Features of a value, which are HEAD_DIM positions apart in the cache. */
#define VALUE_DIM (RANK ? RANK : HEAD_DIM)

/* Vectors of a head that are accumulated together, for all query heads of a KV head. */
#define WIDTH (SUMS / GROUPS == 0 ? 1 : SUMS / GROUPS < VALUE_DIM / WIDE ? SUMS / GROUPS : VALUE_DIM / WIDE)

/* Cached positions to prefetch ahead of the current one, and floats of a cache line. */
#define PREFETCHED 32
#define LINE 16

/* How layers choose experts, and the weights of their outputs. */
typedef struct {
    int64_t experts, top_k, groups, top_groups; /* no experts: all layers are dense */
    int64_t ranked_by; /* number of a group's highest scores whose sum ranks it: 1 or 2 */
    int64_t is_sigmoid, renormalizes;
    int64_t size; /* intermediate size of an expert */
    float scale, epsilon; /* `epsilon`: added to the sum of weights before it divides them */
} Routing;

/* How MLPs combine gate and up. */
typedef struct {
    int64_t is_gelu;           /* the tanh approximation of GELU; otherwise gate * sigmoid(alpha * gate) */
    float alpha, limit, shift; /* `limit`: of the magnitudes, or infinite */
} Activation;

/* Sizes of all recurrent layers of a model. Only delta nets have heads. `taps`, `features`: positions and features that the
   convolution reads. `tail_rows`: rows of a tail. */
typedef struct {
    int64_t key_heads, value_heads, key_size, value_size, taps, features, tail_rows;
} RecurrenceSizes;

/* Sizes of heads with latent attention before absorption, and the epsilon of norms of latent vectors. */
typedef struct {
    int64_t key_dim, rotary_dim, value_dim; /* `key_dim`: without the rotary part */
    float eps;
} LatentSizes;

/* Tables [positions, HEAD_DIM], or [positions, rotary_dim] with latent attention. Sines of the first half of a head are negated. */
typedef struct {
    const float *cosines, *sines;
} Rotary;

typedef struct {
    Linear query_key_value;          /* then gates of the query heads, if the layer is gated */
    Linear inputs;                   /* of a recurrent layer or latent attention, in place of query_key_value */
    Linear query_up, key_ups, value_ups; /* of latent attention; query_up has no panels if `inputs` has the queries */
    Linear out;
    Linear gate_up, down;            /* of the MLP for all rows; without panels if all are experts */
    Linear router, gate_ups, downs;  /* of the experts, whose outputs follow each other; without panels if there are none */
    const float *correction;         /* of the scores that choose experts, [experts], or null */
    const float *shared_gate;        /* of the MLP beside experts, [hidden], or null */
    const float *before_attention, *before_mlp; /* norm weights, [hidden] */
    const float *after_attention, *after_mlp;   /* norm weights, [hidden], or null */
    const float *head_norms;                    /* [heads + kv_heads, HEAD_DIM], or null */
    const float *query_norm, *latent_norm;      /* of latent vectors, [inputs of query_up] and [RANK] */
    const float *sinks;                         /* [heads], or null */
    int64_t window;                             /* visible positions of a row, its own included; 0: all */
    int64_t rotary;                             /* index of the rotary tables */
    int64_t is_gated;                           /* whether sigmoids of gates multiply the attended features */
    float softcap;                              /* bound on scores; 0: none */
    float *keys, *values;                        /* [kv_heads, columns, HEAD_DIM] */
    const float *taps;             /* of a recurrent layer, [taps, features], oldest first */
    const float *taps_bias;        /* [features], or null */
    const float *rate, *dt_bias;   /* of a delta net, [value_heads]: log decay = rate * softplus(step + dt_bias) */
    const float *gate_norm;        /* [value_size] */
    float *states, *edges, *tail_inputs, *tail_gates; /* as in recurrent.py */
} Layer;

typedef struct {
    const Layer *layers;
    int64_t num_layers, hidden, intermediate, kv_heads, columns; /* `intermediate`: of the largest MLP */
    const int32_t *tables;         /* [slots, table_size]: pages with a sequence's logical columns, in order */
    int64_t table_size, page_size; /* columns of a page: a multiple of LANES */
    const Rotary *rotaries;
    const float *norm;
    const float *input_norms; /* [2, hidden] weights of the norms of a state and an embedding before `fc`, or null */
    int64_t norms_output;     /* whether own states are those after the norm */
    Linear embedding, head; /* [vocabulary, hidden]; a tied head has the panels of the embedding */
    Linear fc;              /* [hidden, 2 * hidden], for a state and an embedding; without panels: reads no states */
    float eps, scaling;
    float embedding_scale, softcap; /* `softcap`: bound on logits; 0: none */
    Routing routing;
    Activation activation;
    RecurrenceSizes recurrence;
    LatentSizes latent;
} Model;

typedef struct {
    int64_t rows, results, threads;
    const int64_t *token_ids, *positions, *slots; /* [rows] */
    const int64_t *prefix_lengths, *offsets; /* [rows]: shift of later positions, in logical columns */
    const int64_t *result_rows;              /* [results]: the rows that need logits */
    float *workspace;
    int64_t scores; /* length of a query head's scores, in each thread: a multiple of LANES */
    float *logits;  /* [results, head.outputs] */
    const float *input_states; /* [rows, hidden], if the model has an fc */
    float *own_states;         /* [results, hidden]: the hidden states of the result rows, or null */
    int64_t num_state_layers;
    const int64_t *state_layers; /* [num_state_layers] numbers of layers after which to record the hidden states */
    uint16_t *states;            /* bfloat16 [rows, num_state_layers, hidden] */
    int64_t num_segments;
    const Segment *segments; /* of recurrent layers */
} Batch;

#define HEADS(model) (GROUPS * (model)->kv_heads)

/* --- One row */

/* Of `size` features. */
static INLINE float dot(const float *x, const float *y, int64_t size) {
    wide sums[SLICES] = {{0}};
    for (int64_t i = 0; i < size; i += LANES)
        for (int s = 0; s < SLICES; s++) sums[s] += at(x + i, s) * at(y + i, s);
    return folded(sums, 0);
}

static INLINE wide sigmoid(wide x) { return 1.0f / (1.0f + exponential((wide){0} - x)); }

/* x / rms(x) * weight, of `size` features; `out` may be `x`. */
static void rms_norm(const float *x, const float *weight, int64_t size, float eps, float *out) {
    float scale = 1.0f / sqrtf(dot(x, x, size) / size + eps);
    for (int64_t i = 0; i < size; i += WIDE) put(out + i, 0, at(x + i, 0) * scale * at(weight + i, 0));
}

static INLINE void rotate(const float *cosines, const float *sines, int64_t size, float *head) {
    for (int64_t i = 0; i < size / 2; i++) {
        float first = head[i], second = head[i + size / 2];
        head[i] = first * cosines[i] + second * sines[i];
        head[i + size / 2] = second * cosines[i + size / 2] + first * sines[i + size / 2];
    }
}

/* Where a row's visible positions are cached, from `first` up to its own, the last of `count`. */
typedef struct {
    const int32_t *pages; /* of its sequence */
    int64_t page_size, first, count, prefix, offset;
} Places;

static Places places_of(const Model *model, const Layer *layer, const Batch *batch, int64_t row) {
    int64_t count = batch->positions[row] + 1, offset = batch->offsets[row];
    return (Places){model->tables + batch->slots[row] * model->table_size, model->page_size,
                    layer->window && layer->window < count ? count - layer->window : 0, count,
                    offset ? batch->prefix_lengths[row] : count, offset};
}

/* The column that caches a position. */
static int64_t column_of(const Places *places, int64_t position) {
    int64_t logical = position + (position < places->prefix ? 0 : places->offset);
    return places->pages[logical / places->page_size] * places->page_size + logical % places->page_size;
}

/* Finds the first column of each block of LANES positions, from the first visible block on; -1 if the block's columns
   are not contiguous. Returns the number of blocks, counted from position 0. */
static int64_t find_blocks(const Places *places, int32_t *blocks) {
    int64_t size = places->page_size, count = places->count, prefix = places->prefix, number = places->first / LANES;
    int64_t page = number * LANES / size, within = number * LANES % size; /* of the block, if it precedes the branch */
    for (int64_t i = number * LANES; i < count; i += LANES, number++) {
        int64_t end = i + LANES < count ? i + LANES : count;
        if (end <= prefix) {
            blocks[number] = places->pages[page] * size + within;
        } else {
            int64_t first = column_of(places, i);
            blocks[number] = (i >= prefix && first % size + end - i <= size) ? first : -1;
        }
        if ((within += LANES) == size) page++, within = 0;
    }
    return number;
}

/* Normalizes and rotates the queries and keys of a row in place, then caches its keys and values. */
static void cache(const Model *model, const Layer *layer, const Batch *batch, int64_t row, float *heads) {
    int64_t rotated = HEADS(model) + model->kv_heads;
    int64_t position = batch->positions[row] * HEAD_DIM;
    const Rotary *rotary = model->rotaries + layer->rotary;
    for (int64_t h = 0; h < rotated; h++) {
        float *head = heads + h * HEAD_DIM;
        if (layer->head_norms) rms_norm(head, layer->head_norms + h * HEAD_DIM, HEAD_DIM, model->eps, head);
        rotate(rotary->cosines + position, rotary->sines + position, HEAD_DIM, head);
    }
    const float *key = heads + HEADS(model) * HEAD_DIM, *value = heads + rotated * HEAD_DIM;
    const Places places = places_of(model, layer, batch, row);
    int64_t column = column_of(&places, batch->positions[row]);
    for (int64_t h = 0; h < model->kv_heads; h++) {
        int64_t to = (h * model->columns + column) * HEAD_DIM;
        for (int i = 0; i < HEAD_DIM; i += WIDE) {
            put(layer->keys + to + i, 0, at(key + h * HEAD_DIM + i, 0));
            put(layer->values + to + i, 0, at(value + h * HEAD_DIM + i, 0));
        }
    }
}

/* Dot products of a query with `count` <= LANES keys, times `scaling`. Further lanes repeat the last key. The keys are
   contiguous, or `scattered` if given. */
static INLINE void dot_scores(const float *query, const float *keys, const float *const *scattered, int count,
                              float scaling, float *out) {
    for (int first = 0; first < LANES; first += WIDE) {
        wide sums[WIDE];
        for (int i = 0; i < WIDE; i++) {
            int index = first + i < count ? first + i : count - 1;
            const float *key = scattered ? scattered[index] : keys + index * HEAD_DIM;
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

/* The address PREFETCHED positions after a block. Past the last block, it continues at `after`, which comes next. */
static INLINE const float *prefetch_at(const float *positions, const int32_t *blocks, int64_t block, int64_t number,
                                       const float *after) {
    block += number < PREFETCHED / LANES ? number : PREFETCHED / LANES;
    if (block >= number) return after + (block - number) * LANES * HEAD_DIM;
    return positions + (blocks[block] < 0 ? 0 : blocks[block]) * (int64_t)HEAD_DIM;
}

/* Adds `count` contiguous values, weighted by their scores. */
static INLINE void add_values(int width, wide sums[GROUPS][WIDTH], const float *values, int64_t count,
                              const float *weights, int64_t stride, const float *fetched) {
    for (int64_t i = 0; i < count; i++) {
        for (int v = 0; v < width * WIDE; v += LINE) __builtin_prefetch(fetched + i * HEAD_DIM + v, 0, 2);
        for (int g = 0; g < GROUPS; g++)
            for (int v = 0; v < width; v++) sums[g][v] += at(values + i * HEAD_DIM, v) * weights[g * stride + i];
    }
}

/* The mean of the values of all positions, weighted by their scores, for `width` vectors of a head. `after`: address to
   prefetch after the values. `apart`: distance between the results of two query heads. */
static INLINE void weighted_mean(int width, const float *values, const Places *places, const int32_t *blocks,
                                 int64_t number, const float *scores, int64_t stride, const float *total,
                                 const float *after, float *out, int64_t apart) {
    wide sums[GROUPS][WIDTH];
    for (int g = 0; g < GROUPS; g++)
        for (int v = 0; v < width; v++) sums[g][v] = (wide){0};
    for (int64_t b = places->first / LANES, i = places->first; b < number; i = ++b * LANES) {
        const float *fetched = prefetch_at(values, blocks, b, number, after);
        int64_t end = (b + 1) * LANES < places->count ? (b + 1) * LANES : places->count;
        if (blocks[b] >= 0)
            add_values(width, sums, values + (blocks[b] + i - b * LANES) * (int64_t)HEAD_DIM, end - i, scores + i, stride,
                       fetched);
        else
            for (int64_t k = i; k < end; k++)
                add_values(width, sums, values + column_of(places, k) * HEAD_DIM, 1, scores + k, stride, fetched);
    }
    for (int g = 0; g < GROUPS; g++)
        for (int v = 0; v < width; v++) put(out + g * apart, v, sums[g][v] / total[g]);
}

/* Scores of `count` <= LANES positions from `i` on, whose columns are not contiguous. */
static void scattered_scores(const float *query, const float *keys, const Places *places, int64_t i, int count,
                             float scaling, float *out, int64_t stride) {
    const float *scattered[LANES];
    for (int k = 0; k < count; k++) scattered[k] = keys + column_of(places, i + k) * HEAD_DIM;
    for (int g = 0; g < GROUPS; g++)
        dot_scores(query + g * HEAD_DIM, keys, scattered, count, scaling, out + g * stride);
}

/* Turns the scores of positions `begin` to `count` into weights; positions before `first` are masked. Returns their
   sum. A sink, if there is one, adds only to the sum. */
static INLINE float weigh(float *weights, int64_t begin, int64_t first, int64_t count, int64_t end, float softcap,
                          const float *sink) {
    if (softcap)
        for (int64_t i = begin; i < count; i += WIDE)
            put(weights + i, 0, hyperbolic_tangent(at(weights + i, 0) / softcap) * softcap);
    for (int64_t i = begin; i < first; i++) weights[i] = -INFINITY;
    for (int64_t i = count; i < end; i++) weights[i] = -INFINITY;
    wide peaks[SLICES], sum[SLICES] = {{0}};
    for (int s = 0; s < SLICES; s++) peaks[s] = at(weights + begin, s);
    for (int64_t i = begin + LANES; i < count; i += LANES)
        for (int s = 0; s < SLICES; s++) peaks[s] = larger(peaks[s], at(weights + i, s));
    float largest = folded(peaks, 1);
    if (sink && *sink > largest) largest = *sink;
    for (int64_t i = begin; i < count; i += LANES) {
        for (int s = 0; s < SLICES; s++) put(weights + i, s, exponential(at(weights + i, s) - largest));
        /* exp() of a masked score is tiny, but not zero. */
        for (int64_t k = i; k < first; k++) weights[k] = 0;
        if (i + LANES > count)
            for (int64_t k = count; k < i + LANES; k++) weights[k] = 0;
        for (int s = 0; s < SLICES; s++) sum[s] += at(weights + i, s);
    }
    float total = folded(sum, 0);
    return sink ? total + exponential((wide){0} + (*sink - largest))[0] : total;
}

/* Attention of the query heads of one KV head over the visible positions. `keys`, `values`: of the head. `sinks`: of the
   query heads, or null. `scores`: [GROUPS, stride] floats. `blocks`: of the positions. `after`: the keys that this thread
   probably reads next. `apart`: distance between the results of two query heads. */
static void attend(const float *query, const float *keys, const float *values, const Places *places,
                   const int32_t *blocks, int64_t number, float scaling, float softcap, const float *sinks, float *scores,
                   int64_t stride, const float *after, float *out, int64_t apart) {
    int64_t count = places->count, begin = places->first / LANES;
    for (int64_t b = begin; b < number; b++) {
        const float *fetched = prefetch_at(keys, blocks, b, number, values);
        for (int k = 0; k < LANES * HEAD_DIM; k += LINE) __builtin_prefetch(fetched + k, 0, 2);
        const float *block = keys + blocks[b] * (int64_t)HEAD_DIM;
        int64_t i = b * LANES;
        int rest = count - i < LANES ? count - i : LANES;
        if (blocks[b] < 0) scattered_scores(query, keys, places, i, rest, scaling, scores + i, stride);
        else
            for (int g = 0; g < GROUPS; g++) {
                const float *head = query + g * HEAD_DIM;
                float *to = scores + g * stride + i;
                if (rest == LANES) dot_scores(head, block, 0, LANES, scaling, to);
                else dot_scores(head, block, 0, rest, scaling, to);
            }
    }
    float total[GROUPS];
    for (int g = 0; g < GROUPS; g++)
        total[g] = weigh(scores + g * stride, begin * LANES, places->first, count, number * LANES, softcap,
                         sinks ? sinks + g : 0);
    int64_t done = 0;
    for (; done + WIDTH * WIDE <= VALUE_DIM; done += WIDTH * WIDE)
        weighted_mean(WIDTH, values + done, places, blocks, number, scores, stride, total, after + done, out + done, apart);
    if (VALUE_DIM / WIDE % WIDTH)
        weighted_mean(VALUE_DIM / WIDE % WIDTH, values + done, places, blocks, number, scores, stride, total,
                      after + done, out + done, apart);
}

/* activation(gate) * (up + shift) */
static void gate(const Activation *activation, const float *gate_up, int64_t size, float *out) {
    wide zero = {0}, lowest = zero - activation->limit;
    for (int64_t i = 0; i < size; i += WIDE) {
        wide x = at(gate_up + i, 0), up = at(gate_up + size + i, 0);
        if (activation->limit < INFINITY) { /* NaN stays NaN */
            x = zero - larger(lowest, zero - x);
            up = zero - larger(lowest, zero - larger(lowest, up));
        }
        /* GELU: 2 * sqrt(2 / pi) * (x + 0.044715 * x^3) */
        wide slope = activation->is_gelu ? x * (1.59576912f + 0.0713548163f * x * x) : x * activation->alpha;
        put(out + i, 0, x / (1.0f + exponential(zero - slope)) * (up + activation->shift));
    }
}
