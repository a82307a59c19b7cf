/* Gated delta nets. Each value head has a state, a matrix [key_size, value_size]. A row decays the state, corrects what
   its key reads from it towards its value, and returns what its query reads.

   The recurrence runs row by row, with one order of additions per column of a state. So the bits of a row depend only on
   the tokens of its sequence, not on how a prompt was cut, and replayed rows give the same bits again. */

#include "rows.h"

#include <string.h>

/* Rows that are prepared together. */
#define PREPARED 16

/* Vectors of columns of a state that these rows update before the next columns. They stay in the L1 cache. */
#define COLUMNS 4

/* Added to the squared length of queries and keys. */
#define LENGTH_EPS 1e-6f

/* Arguments of a stage. */
typedef struct {
    const Model *model;
    const Batch *batch;
    const float *projected; /* [rows, inputs.outputs] */
    float *out;             /* [rows, value_heads * value_size] */
} Recurrence;

/* A value head of a segment. */
typedef struct {
    const Recurrence *pass;
    const DeltaSizes *sizes;
    const Layer *layer;
    const Segment *segment;
    int64_t number, query, key, value; /* first features of the head, of the convolution */
} ValueHead;

/* Rows ready for the recurrence. Results replace their values. */
typedef struct {
    int64_t key_size, value_size, count;
    float *queries, *keys, *values; /* [PREPARED, key_size or value_size] */
    float decays[PREPARED], betas[PREPARED], products[PREPARED]; /* `products`: of query and key */
} PreparedRows;

static int64_t delta_features(const DeltaSizes *sizes) {
    return 2 * sizes->key_heads * sizes->key_size + sizes->value_heads * sizes->value_size;
}

static ValueHead head_of(const Recurrence *pass, const Layer *layer, int64_t segment, int64_t number) {
    const DeltaSizes *sizes = &pass->model->delta;
    int64_t query = number / (sizes->value_heads / sizes->key_heads) * sizes->key_size;
    int64_t keys = sizes->key_heads * sizes->key_size;
    return (ValueHead){pass, sizes, layer, pass->batch->segments + segment, number, query, keys + query,
                       2 * keys + number * sizes->value_size};
}

/* The projected inputs of a new row. */
static const float *projected_at(const ValueHead *head, int64_t position) {
    int64_t row = head->segment->first_row + position - head->segment->start;
    return head->pass->projected + row * head->layer->inputs.outputs;
}

/* The inputs of the convolution at a position; null before the sequence's first. */
static const float *inputs_at(const ValueHead *head, int64_t position) {
    const Segment *segment = head->segment;
    const DeltaSizes *sizes = head->sizes;
    int64_t features = delta_features(sizes), after = position - segment->read_position, edge = sizes->taps - 1;
    if (position >= segment->start) return projected_at(head, position);
    if (segment->read < 0) return 0;
    if (after < 0) return head->layer->edges + ((segment->read + 1) * edge + after) * features;
    return head->layer->tail_inputs + (segment->read_tail * sizes->tail_rows + after) * features;
}

/* The log decay of a head at a position, and its beta `value_heads` floats later, in a tail. */
static float *tail_gates(const ValueHead *head, int64_t tail, int64_t row) {
    const DeltaSizes *sizes = head->sizes;
    return head->layer->tail_gates + (tail * sizes->tail_rows + row) * 2 * sizes->value_heads + head->number;
}

/* --- Preparing rows */

/* out = silu(convolution) of `size` features of a position. */
static INLINE void convolve(const ValueHead *head, int64_t position, int64_t first, int64_t size, float *out) {
    int64_t taps = head->sizes->taps, features = delta_features(head->sizes);
    const float *rows[taps];
    for (int64_t t = 0; t < taps; t++) rows[t] = inputs_at(head, position - taps + 1 + t);
    for (int64_t i = first; i < first + size; i += WIDE) {
        wide sum = {0};
        for (int64_t t = 0; t < taps; t++)
            sum += (rows[t] ? at(rows[t] + i, 0) : (wide){0}) * at(head->layer->taps + t * features + i, 0);
        put(out + i - first, 0, sum * sigmoid(sum));
    }
}

/* Scales a vector to this length. */
static INLINE void rescale(float *x, int64_t size, float length) {
    float scale = length / sqrtf(dot(x, x, size) + LENGTH_EPS);
    for (int64_t i = 0; i < size; i += WIDE) put(x + i, 0, at(x + i, 0) * scale);
}

/* The log decay and the beta of a head at a position. */
static ONE_COPY void find_gates(const ValueHead *head, int64_t position, float *log_decay, float *beta) {
    const Segment *segment = head->segment;
    const DeltaSizes *sizes = head->sizes;
    int64_t heads = sizes->value_heads, number = head->number;
    if (position < segment->start) {
        const float *gates = tail_gates(head, segment->read_tail, position - segment->read_position);
        *log_decay = gates[0], *beta = gates[heads];
        return;
    }
    const float *betas = projected_at(head, position) + delta_features(sizes) + heads * sizes->value_size;
    const float *steps = betas + heads;
    *log_decay = head->layer->rate[number] * softplus((wide){steps[number] + head->layer->dt_bias[number]})[0];
    *beta = sigmoid((wide){betas[number]})[0];
}

static INLINE void prepare(const ValueHead *head, int64_t position, PreparedRows *rows, int64_t row) {
    int64_t key_size = rows->key_size, value_size = rows->value_size;
    float *query = rows->queries + row * key_size, *key = rows->keys + row * key_size, log_decay;
    convolve(head, position, head->query, key_size, query);
    convolve(head, position, head->key, key_size, key);
    convolve(head, position, head->value, value_size, rows->values + row * value_size);
    rescale(query, key_size, 1.0f / sqrtf(key_size));
    rescale(key, key_size, 1.0f);
    find_gates(head, position, &log_decay, rows->betas + row);
    rows->decays[row] = exponential((wide){log_decay})[0];
    rows->products[row] = dot(query, key, key_size);
}

/* --- The recurrence */

/* Runs rows on `width` vectors of columns, from `column` on. */
static INLINE void recur_columns(int width, const PreparedRows *rows, float *state, int64_t column) {
    int64_t key_size = rows->key_size, stride = rows->value_size;
    state += column;
    for (int64_t row = 0; row < rows->count; row++) {
        const float *query = rows->queries + row * key_size, *key = rows->keys + row * key_size;
        float *value = rows->values + row * stride + column, decay = rows->decays[row];
        wide predicted[COLUMNS], read[COLUMNS], change[COLUMNS];
        for (int w = 0; w < width; w++) predicted[w] = read[w] = (wide){0};
        for (int64_t k = 0; k < key_size; k++)
            for (int w = 0; w < width; w++) {
                predicted[w] += at(state + k * stride, w) * key[k];
                read[w] += at(state + k * stride, w) * query[k];
            }
        for (int w = 0; w < width; w++) {
            change[w] = (at(value, w) - predicted[w] * decay) * rows->betas[row];
            put(value, w, read[w] * decay + change[w] * rows->products[row]);
        }
        for (int64_t k = 0; k < key_size; k++)
            for (int w = 0; w < width; w++)
                put(state + k * stride, w, at(state + k * stride, w) * decay + change[w] * key[k]);
    }
}

/* out = norm(read) * silu(gate), at a position. */
static INLINE void gate_read(const ValueHead *head, int64_t position, const float *read) {
    const DeltaSizes *sizes = head->sizes;
    int64_t size = sizes->value_size, row = head->segment->first_row + position - head->segment->start;
    float *out = head->pass->out + (row * sizes->value_heads + head->number) * size;
    const float *gate = projected_at(head, position) + delta_features(sizes) + head->number * size;
    rms_norm(read, head->layer->gate_norm, size, head->pass->model->eps, out);
    for (int64_t i = 0; i < size; i += WIDE) {
        wide x = at(gate + i, 0);
        put(out + i, 0, at(out + i, 0) * x * sigmoid(x));
    }
}

/* Runs the rows from a position to another. */
static ONE_COPY void run_rows(const ValueHead *head, int64_t position, int64_t end, PreparedRows *rows, float *state) {
    for (; position < end; position += rows->count) {
        rows->count = end - position < PREPARED ? end - position : PREPARED;
        for (int64_t row = 0; row < rows->count; row++) prepare(head, position + row, rows, row);
        int64_t column = 0, size = rows->value_size;
        for (; column + COLUMNS * WIDE <= size; column += COLUMNS * WIDE) recur_columns(COLUMNS, rows, state, column);
        for (; column < size; column += WIDE) recur_columns(1, rows, state, column);
        for (int64_t row = 0; row < rows->count; row++)
            if (position + row >= head->segment->start) gate_read(head, position + row, rows->values + row * size);
    }
}

/* --- States in the cache */

/* The state of this head in a checkpoint. */
static float *state_at(const ValueHead *head, int64_t entry) {
    const DeltaSizes *sizes = head->sizes;
    return head->layer->states + (entry * sizes->value_heads + head->number) * sizes->key_size * sizes->value_size;
}

/* Copies the inputs of the convolution that no other head copies; zeros without inputs. */
static void copy_inputs(const ValueHead *head, const float *from, float *to) {
    int64_t key_size = head->sizes->key_size, value_size = head->sizes->value_size;
    int is_first = head->number % (head->sizes->value_heads / head->sizes->key_heads) == 0; /* of its key head */
    const int64_t firsts[] = {head->value, head->query, head->key}, sizes[] = {value_size, key_size, key_size};
    for (int i = 0; i < (is_first ? 3 : 1); i++) {
        if (from) memcpy(to + firsts[i], from + firsts[i], sizes[i] * sizeof(float));
        else memset(to + firsts[i], 0, sizes[i] * sizeof(float));
    }
}

/* Writes the state, and the inputs of the last positions before `write_position`. */
static void write_checkpoint(const ValueHead *head, const float *state) {
    const Segment *segment = head->segment;
    const DeltaSizes *sizes = head->sizes;
    int64_t size = sizes->key_size * sizes->value_size, edge = sizes->taps - 1, features = delta_features(sizes);
    float *edges = head->layer->edges + segment->write * edge * features;
    memcpy(state_at(head, segment->write), state, size * sizeof(float));
    for (int64_t t = 0; t < edge; t++)
        copy_inputs(head, inputs_at(head, segment->write_position - edge + t), edges + t * features);
}

/* Stores the inputs and gates of new rows in the tail of the checkpoint before them. */
static void write_tail(const ValueHead *head) {
    const Segment *segment = head->segment;
    int writes = segment->write >= 0;
    int64_t tail = writes ? segment->write_tail : segment->read_tail;
    int64_t begin = writes ? segment->write_position : segment->read_position;
    int64_t position = begin > segment->start ? begin : segment->start, end = segment->start + segment->rows;
    for (; position < end; position++) {
        int64_t row = position - begin;
        float *gates = tail_gates(head, tail, row);
        float *inputs = head->layer->tail_inputs + (tail * head->sizes->tail_rows + row) * delta_features(head->sizes);
        copy_inputs(head, projected_at(head, position), inputs);
        find_gates(head, position, gates, gates + head->sizes->value_heads);
    }
}

static void run_head(const ValueHead *head) {
    const Segment *segment = head->segment;
    int64_t key_size = head->sizes->key_size, value_size = head->sizes->value_size, size = key_size * value_size;
    int64_t position = segment->read_position, end = segment->start + segment->rows;
    float queries[PREPARED * key_size], keys[PREPARED * key_size], values[PREPARED * value_size];
    float state[size] __attribute__((aligned(64))); /* no vector spans two cache lines */
    PreparedRows rows = {key_size, value_size, 0, queries, keys, values};
    if (segment->read < 0) memset(state, 0, sizeof(state));
    else memcpy(state, state_at(head, segment->read), sizeof(state));
    if (segment->write >= 0) {
        run_rows(head, position, segment->write_position, &rows, state);
        write_checkpoint(head, state);
        position = segment->write_position;
    }
    run_rows(head, position, end, &rows, state);
    write_tail(head);
}

/* Units: value heads of each segment in turn. */
static void recur(const Stage *stage, int64_t task, int64_t end) {
    const Recurrence *pass = stage->pass;
    int64_t heads = pass->model->delta.value_heads;
    for (; task < end; task++) {
        const ValueHead head = head_of(pass, stage->item, task / heads, task % heads);
        if (head.segment->rows) run_head(&head);
    }
}
