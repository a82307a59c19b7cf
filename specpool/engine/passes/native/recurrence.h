/* The base of recurrent layers: a short convolution, whose inputs come from new rows, tails and checkpoints. */

#include "rows.h"

#include <string.h>

/* Arguments of a stage. */
typedef struct {
    const Model *model;
    const Batch *batch;
    float *projected; /* [rows, inputs.outputs]: first the features that the convolution reads */
    float *out;       /* [rows, out.inputs] */
} Recurrence;

/* Features of the convolution. */
typedef struct {
    int64_t first, size;
} Range;

/* A task's work on a segment. */
typedef struct {
    const Recurrence *pass;
    const RecurrenceSizes *sizes;
    const Layer *layer;
    const Segment *segment;
    int64_t num_ranges;
    Range ranges[3]; /* the features that this task copies to the cache */
} Run;

static Run run_of(const Recurrence *pass, const Layer *layer, int64_t segment) {
    return (Run){pass, &pass->model->recurrence, layer, pass->batch->segments + segment};
}

/* The projected inputs of a new row. */
static const float *projected_at(const Run *run, int64_t position) {
    int64_t row = run->segment->first_row + position - run->segment->start;
    return run->pass->projected + row * run->layer->inputs.outputs;
}

/* The inputs of the convolution at a position; null before the sequence's first. */
static const float *inputs_at(const Run *run, int64_t position) {
    const Segment *segment = run->segment;
    const RecurrenceSizes *sizes = run->sizes;
    int64_t features = sizes->features, after = position - segment->read_position, edge = sizes->taps - 1;
    if (position >= segment->start) return projected_at(run, position);
    if (segment->read < 0) return 0;
    if (after < 0) return run->layer->edges + ((segment->read + 1) * edge + after) * features;
    return run->layer->tail_inputs + (segment->read_tail * sizes->tail_rows + after) * features;
}

/* Finds the inputs of the convolution at a position: `taps` rows, oldest first. */
static INLINE void find_inputs(const Run *run, int64_t position, const float **rows) {
    for (int64_t t = 0; t < run->sizes->taps; t++) rows[t] = inputs_at(run, position - run->sizes->taps + 1 + t);
}

/* A vector of the convolution's results, from feature `i` on. `rows`: from `find_inputs`. */
static INLINE wide convolve(const Run *run, const float *const *rows, int64_t i) {
    const Layer *layer = run->layer;
    wide sum = layer->taps_bias ? at(layer->taps_bias + i, 0) : (wide){0};
    for (int64_t t = 0; t < run->sizes->taps; t++)
        sum += (rows[t] ? at(rows[t] + i, 0) : (wide){0}) * at(layer->taps + t * run->sizes->features + i, 0);
    return sum;
}

/* --- The cache */

/* Copies the task's features; zeros if `from` is null. */
static void copy_features(const Run *run, const float *from, float *to) {
    for (const Range *range = run->ranges; range < run->ranges + run->num_ranges; range++) {
        if (from) memcpy(to + range->first, from + range->first, range->size * sizeof(float));
        else memset(to + range->first, 0, range->size * sizeof(float));
    }
}

/* Writes the inputs of the last positions before `write_position`. */
static void write_edges(const Run *run) {
    const Segment *segment = run->segment;
    int64_t edge = run->sizes->taps - 1, features = run->sizes->features;
    float *edges = run->layer->edges + segment->write * edge * features;
    for (int64_t t = 0; t < edge; t++)
        copy_features(run, inputs_at(run, segment->write_position - edge + t), edges + t * features);
}

/* Where new rows after the newest checkpoint go: the row of a tail for position `first`, and so on. */
typedef struct {
    int64_t first, end, row; /* `row`: counted over all tails */
} TailRows;

static TailRows tail_rows_of(const Run *run) {
    const Segment *segment = run->segment;
    int writes = segment->write >= 0;
    int64_t tail = writes ? segment->write_tail : segment->read_tail;
    int64_t begin = writes ? segment->write_position : segment->read_position;
    int64_t first = begin > segment->start ? begin : segment->start;
    return (TailRows){first, segment->start + segment->rows, tail * run->sizes->tail_rows + first - begin};
}

/* Stores the inputs of new rows after the newest checkpoint. */
static void write_inputs(const Run *run) {
    TailRows rows = tail_rows_of(run);
    for (; rows.first < rows.end; rows.first++, rows.row++)
        copy_features(run, projected_at(run, rows.first), run->layer->tail_inputs + rows.row * run->sizes->features);
}
