/* One forward pass of a Llama-like decoder over packed rows, in float32, on the threads of pool.h. Weights take
   the fewest bits that represent them exactly (panels.h): a step of few rows takes as long as reading them.

   The pass is batch-invariant by construction. GEMM adds the terms of each output in order, with one vector lane per
   output, and everything else works on one row alone. So no shape needs padding.

   Layers attend, perhaps to latent vectors (latent.h), or are gated delta nets (delta_net.h) or short convolutions
   (short_conv.h).

   Compile-time constants: HEAD_DIM (a multiple of LANES), GROUPS (query heads per KV head), KINDS (of the weights),
   ROUND_ACTIVATIONS (1: quantized panels take activations rounded to 8 bits) and RANK (features of a latent vector;
   0: attention is not latent).
   decoder.py mirrors the structs. */

#include "latent.h"

/* --- The stages of a pass. `forward` runs them all; the ranks of a sharded model exchange results in between. Each stage
   is compiled once, so both give the same bits. */

/* Activations of a pass, each [rows, ...]. */
typedef struct {
    float *hidden, *normed, *heads, *attended, *branch, *gate_up, *gated, *joined, *scores;
    RoundedPart *rounded; /* the inputs of the next GEMM */
} Activations;

/* Floats of a row that attention or the recurrence reads, and that it writes. */
static int64_t projected_stride(const Layer *layer) {
    return layer->inputs.panels ? layer->inputs.outputs : layer->query_key_value.outputs;
}

static int64_t attended_stride(const Model *model, const Layer *layer) {
    return layer->inputs.panels ? layer->out.inputs : HEADS(model) * HEAD_DIM;
}

/* The maximum over all layers. */
static int64_t max_projected(const Model *model) {
    int64_t size = 0;
    for (const Layer *layer = model->layers; layer < model->layers + model->num_layers; layer++)
        size = projected_stride(layer) > size ? projected_stride(layer) : size;
    return size;
}

static int64_t max_attended(const Model *model) {
    int64_t size = 0;
    for (const Layer *layer = model->layers; layer < model->layers + model->num_layers; layer++)
        size = attended_stride(model, layer) > size ? attended_stride(model, layer) : size;
    return size;
}

/* Inputs of `fc`; 0 if the model reads no states. */
static int64_t joined_stride(const Model *model) { return model->fc.panels ? 2 * model->hidden : 0; }

static int64_t rounded_floats(const Model *model, int64_t rows) {
    int64_t size = max_attended(model);
    size = model->hidden > size ? model->hidden : size;
    size = model->intermediate > size ? model->intermediate : size;
    size = joined_stride(model) > size ? joined_stride(model) : size;
    return ROUND_ACTIVATIONS * rows * (size / PART) * (int64_t)(sizeof(RoundedPart) / sizeof(float));
}

/* Floats of workspace for the activations, without the scores and blocks of the threads. */
int64_t workspace_floats(const Model *model, int64_t rows) {
    const Layer *layer = model->layers;
    int64_t per_row = 2 * model->hidden + max_projected(model) + max_attended(model) + layer->out.outputs +
                      3 * model->intermediate + joined_stride(model);
    Mixture mixture;
    Latent latent;
    float *end = lay_out_latent(&latent, model, 0, rows, 0, lay_out_mixture(&mixture, model, rows, 0, 0));
    return rows * per_row + rounded_floats(model, rows) + (end - (float *)0);
}

/* `mixture`, `latent`: set to the activations of experts and of latent attention. */
static Activations lay_out(const Model *model, const Batch *batch, Mixture *mixture, Latent *latent) {
    const Layer *layer = model->layers;
    Activations acts;
    acts.hidden = batch->workspace;
    acts.normed = acts.hidden + batch->rows * model->hidden;
    acts.heads = acts.normed + batch->rows * model->hidden;
    acts.attended = acts.heads + batch->rows * max_projected(model);
    acts.branch = acts.attended + batch->rows * max_attended(model);
    acts.gate_up = acts.branch + batch->rows * layer->out.outputs;
    acts.gated = acts.gate_up + batch->rows * 2 * model->intermediate;
    acts.joined = acts.gated + batch->rows * model->intermediate;
    acts.rounded = (RoundedPart *)(acts.joined + batch->rows * joined_stride(model));
    float *end = (float *)acts.rounded + rounded_floats(model, batch->rows);
    end = lay_out_mixture(mixture, model, batch->rows, acts.normed, end);
    acts.scores = latent->scores = lay_out_latent(latent, model, batch, batch->rows, acts.heads, end);
    return acts;
}

Activations activations_of(const Model *model, const Batch *batch) {
    Mixture mixture;
    Latent latent;
    return lay_out(model, batch, &mixture, &latent);
}

/* Arguments of all stages. `branch`: what to add to the hidden states, rows of `stride` floats. */
typedef struct {
    const Model *model;
    const Batch *batch;
    Activations acts;
    float *branch;
    int64_t stride;
    Mixture mixture;
    Recurrence recurrence;
    Latent latent;
} Pass;

static Pass pass_of(const Model *model, const Batch *batch) {
    Pass pass = {.model = model, .batch = batch, .stride = model->layers->out.outputs};
    pass.acts = lay_out(model, batch, &pass.mixture, &pass.latent);
    pass.branch = pass.acts.branch;
    pass.recurrence = (Recurrence){model, batch, pass.acts.heads, pass.acts.attended};
    return pass;
}

/* The scaled embedding of a row's token. */
static void embed_row(const Pass *pass, int64_t row, float *out) {
    const Model *model = pass->model;
    embedding_row(&model->embedding, pass->batch->token_ids[row], out);
    if (model->embedding_scale != 1)
        for (int64_t i = 0; i < model->hidden; i += WIDE) put(out + i, 0, at(out + i, 0) * model->embedding_scale);
}

static ONE_COPY void embed(const Stage *stage, int64_t row, int64_t end) {
    const Pass *pass = stage->pass;
    for (; row < end; row++) embed_row(pass, row, stage->out + row * pass->model->hidden);
}

/* hidden += norm(branch) */
static ONE_COPY void add(const Pass *pass, int64_t row, const float *norm) {
    int64_t hidden = pass->model->hidden;
    float *from = pass->branch + row * pass->stride, *to = pass->acts.hidden + row * hidden;
    if (norm) rms_norm(from, norm, hidden, pass->model->eps, from);
    for (int64_t i = 0; i < hidden; i += WIDE) put(to + i, 0, at(to + i, 0) + at(from + i, 0));
}

/* Rounds row `row` of `rows` for the next GEMM. */
static void round_input(const Pass *pass, const float *x, int64_t size, int64_t row, int64_t rows) {
    if (ROUND_ACTIVATIONS) round_row(x, size, row, rows, pass->acts.rounded);
}

/* normed[to] = norm(hidden[row]). `rows`: rows of `normed`. */
static ONE_COPY void normalize(const Pass *pass, int64_t row, const float *norm, int64_t to, int64_t rows) {
    int64_t hidden = pass->model->hidden;
    float *normed = pass->acts.normed + to * hidden;
    rms_norm(pass->acts.hidden + row * hidden, norm, hidden, pass->model->eps, normed);
    round_input(pass, normed, hidden, to, rows);
}

static void normalize_for_attention(const Stage *stage, int64_t row, int64_t end) {
    const Layer *layer = stage->item;
    for (; row < end; row++) normalize(stage->pass, row, layer->before_attention, row, stage->units);
}

/* Joins the state and the embedding of each row, for `fc`. */
static ONE_COPY void join(const Stage *stage, int64_t row, int64_t end) {
    const Pass *pass = stage->pass;
    int64_t hidden = pass->model->hidden;
    for (; row < end; row++) {
        float *joined = pass->acts.joined + row * 2 * hidden;
        memcpy(joined, pass->batch->input_states + row * hidden, hidden * sizeof(float));
        embed_row(pass, row, joined + hidden);
        const float *norms = pass->model->input_norms;
        for (int64_t part = 0; norms && part < 2 * hidden; part += hidden)
            rms_norm(joined + part, norms + part, hidden, pass->model->eps, joined + part);
        round_input(pass, joined, 2 * hidden, row, stage->units);
    }
}

/* Takes the result of `fc`, then normalizes for the first layer. */
static void take_joined(const Stage *stage, int64_t row, int64_t end) {
    const Pass *pass = stage->pass;
    int64_t hidden = pass->model->hidden;
    for (int64_t r = row; r < end; r++)
        memcpy(pass->acts.hidden + r * hidden, pass->branch + r * pass->stride, hidden * sizeof(float));
    normalize_for_attention(stage, row, end);
}

/* Adds the attention branch, then normalizes for the MLP. */
static void add_attention(const Stage *stage, int64_t row, int64_t end) {
    const Layer *layer = stage->item;
    for (; row < end; row++) {
        add(stage->pass, row, layer->after_attention);
        normalize(stage->pass, row, layer->before_mlp, row, stage->units);
    }
}

/* The bits of the nearest bfloat16; ties go to even bits. */
static uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    if (value != value) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* Records the hidden states of a row, if they are needed after this number of layers. */
static void record_states(const Pass *pass, int64_t row, int64_t num_layers) {
    const Batch *batch = pass->batch;
    int64_t hidden = pass->model->hidden, count = batch->num_state_layers;
    const float *from = pass->acts.hidden + row * hidden;
    for (int64_t i = 0; i < count; i++) {
        if (batch->state_layers[i] != num_layers) continue;
        uint16_t *to = batch->states + (row * count + i) * hidden;
        for (int64_t k = 0; k < hidden; k++) to[k] = to_bfloat16(from[k]);
    }
}

/* Adds the MLP branch, then normalizes for the next layer, if there is one. */
static void add_mlp(const Stage *stage, int64_t row, int64_t end) {
    const Pass *pass = stage->pass;
    const Layer *layer = stage->item, *last = pass->model->layers + pass->model->num_layers - 1;
    for (; row < end; row++) {
        if (layer->gate_ups.panels) combine(&pass->mixture, layer, row, pass->branch + row * pass->stride);
        add(pass, row, layer->after_mlp);
        record_states(pass, row, layer - pass->model->layers + 1);
        if (layer < last) normalize(pass, row, layer[1].before_attention, row, stage->units);
    }
}

static void normalize_results(const Stage *stage, int64_t result, int64_t end) {
    const Pass *pass = stage->pass;
    const Batch *batch = pass->batch;
    int64_t hidden = pass->model->hidden;
    for (; result < end; result++) {
        int64_t row = batch->result_rows[result];
        normalize(pass, row, pass->model->norm, result, stage->units);
        if (batch->own_states) {
            const Activations *acts = &pass->acts;
            const float *own = pass->model->norms_output ? acts->normed + result * hidden : acts->hidden + row * hidden;
            memcpy(batch->own_states + result * hidden, own, hidden * sizeof(float));
        }
    }
}

static ONE_COPY void cache_rows(const Stage *stage, int64_t row, int64_t end) {
    const Pass *pass = stage->pass;
    const Layer *layer = stage->item;
    for (; row < end; row++)
        cache(pass->model, layer, pass->batch, row, pass->acts.heads + row * layer->query_key_value.outputs);
}

/* Whether each thread can round the heads that it computes: no part spans two KV heads. */
#define ROUNDS_HEADS (ROUND_ACTIVATIONS && GROUPS * HEAD_DIM % PART == 0)

/* attended *= sigmoid(gate), for the query heads of a KV head. */
static void gate_heads(const float *gates, float *attended) {
    for (int i = 0; i < GROUPS * HEAD_DIM; i += WIDE)
        put(attended + i, 0, at(attended + i, 0) * sigmoid(at(gates + i, 0)));
}

static ONE_COPY void attend_tasks(const Stage *stage, int64_t task, int64_t end) {
    const Pass *pass = stage->pass;
    const Model *model = pass->model;
    const Layer *layer = stage->item;
    const Batch *batch = pass->batch;
    int64_t rows = batch->rows, heads_stride = layer->query_key_value.outputs, stride = attended_stride(model, layer);
    float *scores = pass->acts.scores + thread_number * (GROUPS * batch->scores + batch->scores / LANES);
    int32_t *blocks = (int32_t *)(scores + GROUPS * batch->scores);
    for (; task < end; task++) {
        int64_t head = task / rows, row = task % rows, first = head * model->columns * HEAD_DIM;
        /* Threads take tasks roughly in turn. */
        int64_t next = task + batch->threads < rows * model->kv_heads ? task + batch->threads : task;
        const Places places = places_of(model, layer, batch, row), after = places_of(model, layer, batch, next % rows);
        int64_t after_first = next / rows * model->columns + column_of(&after, after.first);
        const float *queries = pass->acts.heads + row * heads_stride + head * GROUPS * HEAD_DIM;
        float *attended = pass->acts.attended + row * stride + head * GROUPS * HEAD_DIM;
        attend(queries, layer->keys + first, layer->values + first, &places, blocks, find_blocks(&places, blocks),
               model->scaling, layer->softcap, layer->sinks ? layer->sinks + head * GROUPS : 0, scores, batch->scores,
               layer->keys + after_first * HEAD_DIM, attended, HEAD_DIM);
        if (layer->is_gated) gate_heads(queries + (HEADS(model) + 2 * model->kv_heads) * HEAD_DIM, attended);
        if (ROUNDS_HEADS)
            round_row(attended, GROUPS * HEAD_DIM, row, rows, pass->acts.rounded + head * GROUPS * HEAD_DIM / PART * rows);
    }
}

static void round_attended(const Stage *stage, int64_t row, int64_t end) {
    const Pass *pass = stage->pass;
    int64_t stride = attended_stride(pass->model, stage->item);
    for (; row < end; row++) round_input(pass, pass->acts.attended + row * stride, stride, row, stage->units);
}

static ONE_COPY void gate_rows(const Stage *stage, int64_t row, int64_t end) {
    const Pass *pass = stage->pass;
    const Layer *layer = stage->item;
    int64_t stride = layer->gate_up.outputs, size = stride / 2;
    for (; row < end; row++) {
        float *gated = pass->acts.gated + row * size;
        gate(&pass->model->activation, pass->acts.gate_up + row * stride, size, gated);
        round_input(pass, gated, size, row, stage->units);
    }
}

static Stage rows_stage(void (*work)(const Stage *, int64_t, int64_t), const Pass *pass, const Layer *layer,
                        int64_t rows) {
    return (Stage){work, rows, ROW_GRAIN, pass->batch->threads, ROWS, pass, layer};
}

static Stage gemm_stage(const Linear *linear, int64_t rows, int64_t threads, const float *x,
                        const RoundedPart *rounded, float *out) {
    int64_t panels = rows ? linear->outputs / PANEL : 0;
    return (Stage){gemm, panels, 1, threads, GEMM, rounded, linear, x, out, rows};
}

static Stage pass_gemm(const Linear *linear, const Pass *pass, int64_t rows, const float *x, float *out) {
    return gemm_stage(linear, rows, pass->batch->threads, x, pass->acts.rounded, out);
}

/* Stages that compute the input of the first layer. */
#define INPUT_STAGES 3
static Stage *input_stages(Stage *to, const Pass *pass) {
    int64_t rows = pass->batch->rows;
    const Layer *first = pass->model->layers;
    if (pass->model->fc.panels) {
        *to++ = rows_stage(join, pass, 0, rows);
        *to++ = pass_gemm(&pass->model->fc, pass, rows, pass->acts.joined, pass->branch);
        *to++ = rows_stage(take_joined, pass, first, rows);
    } else {
        *to = rows_stage(embed, pass, 0, rows);
        to++->out = pass->acts.hidden;
        *to++ = rows_stage(normalize_for_attention, pass, first, rows);
    }
    return to;
}

/* Stages of a delta net over normalized rows. Result: `attended`. */
static Stage *recur_stages(Stage *to, const Pass *pass, const Layer *layer) {
    int64_t rows = pass->batch->rows, tasks = pass->batch->num_segments * pass->model->recurrence.value_heads;
    *to++ = pass_gemm(&layer->inputs, pass, rows, pass->acts.normed, pass->acts.heads);
    *to++ = (Stage){recur, tasks, 1, tasks, ATTENTION, &pass->recurrence, layer};
    *to++ = rows_stage(round_attended, pass, layer, ROUND_ACTIVATIONS ? rows : 0);
    return to;
}

/* Stages of a short convolution over normalized rows. Result: `attended`. */
static Stage *convolve_stages(Stage *to, const Pass *pass, const Layer *layer) {
    int64_t rows = pass->batch->rows, tasks = pass->batch->num_segments * num_blocks(pass->model);
    *to++ = pass_gemm(&layer->inputs, pass, rows, pass->acts.normed, pass->acts.heads);
    *to++ = (Stage){gate_inputs, rows, ROW_GRAIN, pass->batch->threads, ROWS, &pass->recurrence, layer};
    *to++ = (Stage){convolve_tasks, tasks, 1, tasks, ATTENTION, &pass->recurrence, layer};
    *to++ = rows_stage(round_attended, pass, layer, ROUND_ACTIVATIONS ? rows : 0);
    return to;
}

/* Stages of latent attention over normalized rows. Result: `attended`. */
static Stage *latent_stages(Stage *to, const Pass *pass, const Layer *layer) {
    const Latent *latent = &pass->latent;
    int64_t rows = pass->batch->rows, tasks = rows * pass->model->kv_heads, threads = pass->batch->threads;
    *to++ = pass_gemm(&layer->inputs, pass, rows, pass->acts.normed, pass->acts.heads);
    *to++ = (Stage){cache_latent, rows, 1, threads, ROWS, latent, layer};
    *to++ = pass_gemm(&layer->query_up, pass, rows, latent->query_latent, latent->projected);
    *to++ = (Stage){place_projected, layer->query_up.panels ? rows : 0, 1, threads, ROWS, latent, layer};
    *to++ = (Stage){absorb, layer->key_ups.outputs / PANEL, 1, threads, GEMM, latent, layer, latent->plain, latent->queries};
    *to++ = (Stage){attend_latent, tasks, 1, tasks, ATTENTION, latent, layer};
    *to++ = (Stage){expand, layer->value_ups.outputs / PANEL, 1, threads, GEMM, latent, layer, latent->attended, pass->acts.attended};
    return to;
}

/* Stages of a layer up to attention or the recurrence over normalized rows. Result: `attended`. */
#define ATTEND_STAGES 7
static Stage *attend_stages(Stage *to, const Pass *pass, const Layer *layer) {
    if (RANK) return latent_stages(to, pass, layer);
    if (layer->rate) return recur_stages(to, pass, layer);
    if (layer->taps) return convolve_stages(to, pass, layer);
    int64_t rows = pass->batch->rows, tasks = rows * pass->model->kv_heads;
    *to++ = pass_gemm(&layer->query_key_value, pass, rows, pass->acts.normed, pass->acts.heads);
    *to++ = rows_stage(cache_rows, pass, layer, rows);
    *to++ = (Stage){attend_tasks, tasks, 1, tasks, ATTENTION, pass, layer}; /* claimed one by one: lengths differ */
    *to++ = rows_stage(round_attended, pass, layer, ROUND_ACTIVATIONS && !ROUNDS_HEADS ? rows : 0);
    return to;
}

/* Stages that add the attention branch and run the router, gate and up. Result: `gated`. */
#define GATE_STAGES 4
static Stage *gate_stages(Stage *to, const Pass *pass, const Layer *layer) {
    int64_t rows = pass->batch->rows;
    *to++ = rows_stage(add_attention, pass, layer, rows);
    *to++ = pass_gemm(&layer->router, pass, rows, pass->acts.normed, pass->mixture.logits);
    *to++ = pass_gemm(&layer->gate_up, pass, rows, pass->acts.normed, pass->acts.gate_up);
    *to++ = rows_stage(gate_rows, pass, layer, layer->gate_up.panels ? rows : 0);
    return to;
}

static void cap_logits(const Stage *stage, int64_t result, int64_t end) {
    const Pass *pass = stage->pass;
    int64_t outputs = pass->model->head.outputs;
    wide cap = (wide){0} + pass->model->softcap;
    for (float *x = pass->batch->logits + result * outputs; x < pass->batch->logits + end * outputs; x += WIDE)
        put(x, 0, hyperbolic_tangent(at(x, 0) / cap) * cap);
}

/* Stages that compute the logits of the result rows. */
#define LOGITS_STAGES 3
static Stage *logits_stages(Stage *to, const Pass *pass) {
    int64_t results = pass->batch->results;
    *to++ = rows_stage(normalize_results, pass, 0, results);
    *to++ = pass_gemm(&pass->model->head, pass, results, pass->acts.normed, pass->batch->logits);
    *to++ = rows_stage(cap_logits, pass, 0, pass->model->softcap ? results : 0);
    return to;
}

/* Runs a whole pass: caches the keys and values of all rows and computes the logits of the result rows. */
void forward(const Model *model, const Batch *batch) {
    const Pass pass = pass_of(model, batch);
    int64_t rows = batch->rows, threads = batch->threads;
    Stage stages[INPUT_STAGES + model->num_layers * (ATTEND_STAGES + GATE_STAGES + EXPERT_STAGES + 3) + LOGITS_STAGES];
    Stage *to = input_stages(stages, &pass);
    for (const Layer *layer = model->layers; layer < model->layers + model->num_layers; layer++) {
        to = attend_stages(to, &pass, layer);
        *to++ = pass_gemm(&layer->out, &pass, rows, pass.acts.attended, pass.branch);
        to = gate_stages(to, &pass, layer);
        *to++ = pass_gemm(&layer->down, &pass, rows, pass.acts.gated, pass.branch);
        to = expert_stages(to, &pass.mixture, layer, threads);
        *to++ = rows_stage(add_mlp, &pass, layer, rows);
    }
    run_stages(stages, logits_stages(to, &pass), threads);
}

/* A step of a draft loop: a pass of `rows` rows, all with logits. */
void forward_step(const Model *model, Batch *batch, int64_t rows) {
    batch->rows = batch->results = rows;
    if (batch->num_segments) batch->num_segments = rows;
    forward(model, batch);
}

/* --- The same stages for the ranks of a sharded model. */

void embed_stage(const Model *model, const Batch *batch, float *out) {
    const Pass pass = {.model = model, .batch = batch};
    Stage stage = rows_stage(embed, &pass, 0, batch->rows);
    stage.out = out;
    run_stages(&stage, &stage + 1, batch->threads);
}

/* The stages after a branch that is contiguous, [rows, hidden]. */
static Pass pass_with(const Model *model, const Batch *batch, float *branch) {
    Pass pass = pass_of(model, batch);
    pass.branch = branch;
    pass.stride = model->hidden;
    return pass;
}

/* Adds the branch of the layer before, [rows, hidden] or null, then attends. Result: `attended`. */
void attend_stage(const Model *model, const Batch *batch, int64_t index, float *branch) {
    const Pass pass = pass_with(model, batch, branch);
    const Layer *layer = model->layers + index;
    Stage stages[1 + ATTEND_STAGES];
    if (branch) *stages = rows_stage(add_mlp, &pass, layer - 1, batch->rows);
    else *stages = rows_stage(normalize_for_attention, &pass, layer, batch->rows);
    run_stages(stages, attend_stages(stages + 1, &pass, layer), batch->threads);
}

/* Adds the attention branch, [rows, hidden], then runs gate and up. Result: `gated`. */
void gate_stage(const Model *model, const Batch *batch, int64_t index, float *branch) {
    const Pass pass = pass_with(model, batch, branch);
    Stage stages[GATE_STAGES];
    run_stages(stages, gate_stages(stages, &pass, model->layers + index), batch->threads);
}

/* Adds the last branch, [rows, hidden], then computes the logits of the result rows. */
void logits_stage(const Model *model, const Batch *batch, float *branch) {
    const Pass pass = pass_with(model, batch, branch);
    Stage stages[1 + LOGITS_STAGES];
    *stages = rows_stage(add_mlp, &pass, model->layers + model->num_layers - 1, batch->rows);
    run_stages(stages, logits_stages(stages + 1, &pass), batch->threads);
}

/* Arguments of a single GEMM. */
typedef struct {
    const float *x;
    int64_t size;
    RoundedPart *rounded;
} Input;

static void round_rows(const Stage *stage, int64_t row, int64_t end) {
    const Input *input = stage->pass;
    for (; row < end; row++)
        round_row(input->x + row * input->size, input->size, row, stage->units, input->rounded);
}

/* A single GEMM. `rounded`: workspace [inputs / PART, rows] if activations are rounded. */
void run_gemm(const Linear *linear, int64_t rows, int64_t threads, const float *x, RoundedPart *rounded, float *out) {
    Input input = {x, linear->inputs, rounded};
    Stage stages[] = {{round_rows, ROUND_ACTIVATIONS ? rows : 0, ROW_GRAIN, threads, ROWS, &input},
                      gemm_stage(linear, rows, threads, x, rounded, out)};
    run_stages(stages, stages + 2, threads);
}
