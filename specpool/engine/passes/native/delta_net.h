/* Gated delta nets. Each value head has a state, a matrix [key_size, value_size]. A row decays the state, moves the
   value that its key reads towards its own, and returns the value that its query reads.

   The recurrence runs row by row, with one order of additions per column of a state. So the bits of a row depend only on
   the tokens of its sequence, not on how a prompt was cut, and replayed rows give the same bits again. */

#include "recurrence.h"

/* Rows that are prepared together. */
#define PREPARED 16

/* Vectors of columns of a state that these rows update before the next columns. They stay in the L1 cache. */
#define COLUMNS 4

/* Added to the squared length of queries and keys. */
#define LENGTH_EPS 1e-6f

/* A value head of a segment. */
typedef struct {
    Run run;
    int64_t number, query, key, value; /* first features of the head, of the convolution */
} ValueHead;

/* Rows ready for the recurrence. Results replace their values. */
typedef struct {
    int64_t key_size, value_size, count;
    float *queries, *keys, *values; /* [PREPARED, key_size or value_size] */
    float decays[PREPARED], betas[PREPARED], products[PREPARED]; /* `products`: of query and key */
} PreparedRows;

static ValueHead head_of(const Recurrence *pass, const Layer *layer, int64_t segment, int64_t number) {
    const RecurrenceSizes *sizes = &pass->model->recurrence;
    int64_t groups = sizes->value_heads / sizes->key_heads, keys = sizes->key_heads * sizes->key_size;
    int64_t query = number / groups * sizes->key_size, key = keys + query, value = 2 * keys + number * sizes->value_size;
    ValueHead head = {run_of(pass, layer, segment), number, query, key, value};
    /* The first value head of a key head copies its features. */
    head.run.num_ranges = number % groups ? 1 : 3;
    const Range ranges[] = {{value, sizes->value_size}, {query, sizes->key_size}, {key, sizes->key_size}};
    memcpy(head.run.ranges, ranges, sizeof(ranges));
    return head;
}

/* The log decay of a head at a row of a tail, and its beta `value_heads` floats later. `row`: counted over all tails. */
static float *tail_gates(const ValueHead *head, int64_t row) {
    return head->run.layer->tail_gates + row * 2 * head->run.sizes->value_heads + head->number;
}

/* --- Preparing rows */

/* out = silu(convolution) of `size` features. `inputs`: from `find_inputs`. */
static INLINE void activate(const ValueHead *head, const float *const *inputs, int64_t first, int64_t size, float *out) {
    for (int64_t i = first; i < first + size; i += WIDE) {
        wide sum = convolve(&head->run, inputs, i);
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
    const Run *run = &head->run;
    const Segment *segment = run->segment;
    int64_t heads = run->sizes->value_heads, number = head->number;
    if (position < segment->start) {
        int64_t row = segment->read_tail * run->sizes->tail_rows + position - segment->read_position;
        const float *gates = tail_gates(head, row);
        *log_decay = gates[0], *beta = gates[heads];
        return;
    }
    const float *betas = projected_at(run, position) + run->sizes->features + heads * run->sizes->value_size;
    const float *steps = betas + heads;
    *log_decay = run->layer->rate[number] * softplus((wide){steps[number] + run->layer->dt_bias[number]})[0];
    *beta = sigmoid((wide){betas[number]})[0];
}

static INLINE void prepare(const ValueHead *head, int64_t position, PreparedRows *rows, int64_t row) {
    int64_t key_size = rows->key_size, value_size = rows->value_size;
    float *query = rows->queries + row * key_size, *key = rows->keys + row * key_size, log_decay;
    const float *inputs[head->run.sizes->taps];
    find_inputs(&head->run, position, inputs);
    activate(head, inputs, head->query, key_size, query);
    activate(head, inputs, head->key, key_size, key);
    activate(head, inputs, head->value, value_size, rows->values + row * value_size);
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
    const RecurrenceSizes *sizes = head->run.sizes;
    int64_t size = sizes->value_size, row = head->run.segment->first_row + position - head->run.segment->start;
    float *out = head->run.pass->out + (row * sizes->value_heads + head->number) * size;
    const float *gate = projected_at(&head->run, position) + sizes->features + head->number * size;
    rms_norm(read, head->run.layer->gate_norm, size, head->run.pass->model->eps, out);
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
            if (position + row >= head->run.segment->start) gate_read(head, position + row, rows->values + row * size);
    }
}

/* --- States in the cache */

/* The state of this head in a checkpoint. */
static float *state_at(const ValueHead *head, int64_t entry) {
    const RecurrenceSizes *sizes = head->run.sizes;
    return head->run.layer->states + (entry * sizes->value_heads + head->number) * sizes->key_size * sizes->value_size;
}

/* Stores the inputs and gates of new rows in the tail of the checkpoint before them. */
static void write_tail(const ValueHead *head) {
    TailRows rows = tail_rows_of(&head->run);
    write_inputs(&head->run);
    for (; rows.first < rows.end; rows.first++, rows.row++) {
        float *gates = tail_gates(head, rows.row);
        find_gates(head, rows.first, gates, gates + head->run.sizes->value_heads);
    }
}

static void run_head(const ValueHead *head) {
    const Segment *segment = head->run.segment;
    const RecurrenceSizes *sizes = head->run.sizes;
    int64_t key_size = sizes->key_size, value_size = sizes->value_size, size = key_size * value_size;
    int64_t position = segment->read_position, end = segment->start + segment->rows;
    float queries[PREPARED * key_size], keys[PREPARED * key_size], values[PREPARED * value_size];
    float state[size] __attribute__((aligned(64))); /* no vector spans two cache lines */
    PreparedRows rows = {key_size, value_size, 0, queries, keys, values};
    if (segment->read < 0) memset(state, 0, sizeof(state));
    else memcpy(state, state_at(head, segment->read), sizeof(state));
    if (segment->write >= 0) {
        run_rows(head, position, segment->write_position, &rows, state);
        memcpy(state_at(head, segment->write), state, sizeof(state));
        write_edges(&head->run);
        position = segment->write_position;
    }
    run_rows(head, position, end, &rows, state);
    write_tail(head);
}

/* Units: value heads of each segment in turn. */
static void recur(const Stage *stage, int64_t task, int64_t end) {
    const Recurrence *pass = stage->pass;
    int64_t heads = pass->model->recurrence.value_heads;
    for (; task < end; task++) {
        const ValueHead head = head_of(pass, stage->item, task / heads, task % heads);
        if (head.run.segment->rows) run_head(&head);
    }
}
