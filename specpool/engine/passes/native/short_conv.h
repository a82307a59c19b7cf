/* Gated short convolutions: out = after * convolution(before * x). A row projects to `before`, `after` and `x`; its state is
   the inputs of the last positions. */

#include "delta_net.h"

/* Features of a task. */
#define CONVOLVED 128

static int64_t num_blocks(const Model *model) { return (model->recurrence.features + CONVOLVED - 1) / CONVOLVED; }

/* Replaces `before` by before * x, the inputs of the convolution. */
static void gate_inputs(const Stage *stage, int64_t row, int64_t end) {
    const Recurrence *pass = stage->pass;
    const Layer *layer = stage->item;
    int64_t features = pass->model->recurrence.features;
    for (; row < end; row++) {
        float *before = pass->projected + row * layer->inputs.outputs, *x = before + 2 * features;
        for (int64_t i = 0; i < features; i += WIDE) put(before + i, 0, at(before + i, 0) * at(x + i, 0));
    }
}

static ONE_COPY void convolve_block(const Run *run) {
    const Segment *segment = run->segment;
    const float *inputs[run->sizes->taps];
    int64_t first = run->ranges->first, end = first + run->ranges->size, features = run->sizes->features;
    for (int64_t position = segment->start; position < segment->start + segment->rows; position++) {
        const float *after = projected_at(run, position) + features;
        float *out = run->pass->out + (segment->first_row + position - segment->start) * features;
        find_inputs(run, position, inputs);
        for (int64_t i = first; i < end; i += WIDE) put(out + i, 0, at(after + i, 0) * convolve(run, inputs, i));
    }
    if (segment->write >= 0) write_edges(run);
    write_inputs(run);
}

/* Units: blocks of features of each segment in turn. */
static void convolve_tasks(const Stage *stage, int64_t task, int64_t end) {
    const Recurrence *pass = stage->pass;
    int64_t blocks = num_blocks(pass->model), features = pass->model->recurrence.features;
    for (; task < end; task++) {
        int64_t first = task % blocks * CONVOLVED;
        Run run = run_of(pass, stage->item, task / blocks);
        run.num_ranges = 1;
        run.ranges[0] = (Range){first, features - first < CONVOLVED ? features - first : CONVOLVED};
        if (run.segment->rows) convolve_block(&run);
    }
}
