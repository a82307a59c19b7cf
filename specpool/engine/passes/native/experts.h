/* Mixtures of experts. Each row chooses some experts, and every expert with rows computes them in one GEMM, so a pass reads
   the weights of an expert at most once. A row adds its experts in the order of its choices, whatever the other rows are.

   The choices of a row are consecutive. Places are the choices grouped by expert. */

#include "short_conv.h"

/* Activations of the experts of a layer. */
typedef struct {
    const Routing *routing;
    const Activation *activation;
    int64_t rows, hidden;
    const float *normed; /* [rows, hidden] */
    float *logits;       /* of the router, [rows, padded experts] */
    float *weights;      /* of the choices, [rows, top_k] */
    int32_t *chosen;     /* experts, [rows, top_k] */
    int32_t *places;     /* of the choices, [rows, top_k] */
    int32_t *begins;     /* first place of each expert, then the number of places, [experts + 1] */
    int32_t *active;     /* experts with rows, [experts] */
    float *inputs;       /* [places, hidden]; later the outputs, [places, padded hidden] */
    float *gate_up, *gated; /* [places, 2 * size], [places, size] */
} Mixture;

static int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

/* Takes `count` floats from a workspace, rounded up to a multiple of LANES. */
static float *take(float **workspace, int64_t count) {
    float *taken = *workspace;
    *workspace += round_up(count, LANES);
    return taken;
}

/* Lays out the activations. Returns the end of the workspace, which may be null to measure it. */
static float *lay_out_mixture(Mixture *mix, const Model *model, int64_t rows, const float *normed, float *workspace) {
    const Routing *routing = &model->routing;
    int64_t experts = routing->experts, choices = rows * routing->top_k;
    *mix = (Mixture){routing, &model->activation, rows, model->hidden, normed};
    if (!experts) return workspace;
    mix->logits = take(&workspace, rows * round_up(experts, PANEL));
    mix->weights = take(&workspace, choices);
    mix->chosen = (int32_t *)take(&workspace, choices);
    mix->places = (int32_t *)take(&workspace, choices);
    mix->begins = (int32_t *)take(&workspace, experts + 1);
    mix->active = (int32_t *)take(&workspace, experts);
    mix->inputs = take(&workspace, choices * round_up(model->hidden, PANEL));
    mix->gate_up = take(&workspace, choices * 2 * routing->size);
    mix->gated = take(&workspace, choices * routing->size);
    return workspace;
}

/* --- Choosing experts, as in `choose_experts` of fused_experts.py */

/* The index of the highest number that is not taken; of equal numbers, the first. Takes it. */
static int64_t take_highest(const float *numbers, int64_t count, uint8_t *taken) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || numbers[i] > numbers[best])) best = i;
    taken[best] = 1;
    return best;
}

/* Replaces the logits of a row with scores. Scores of the padding are arbitrary. */
static void score(const Routing *routing, float *logits) {
    int64_t experts = routing->experts;
    float peak = -INFINITY, sum = 0;
    for (int64_t i = 0; i < experts; i++) peak = logits[i] > peak ? logits[i] : peak;
    for (int64_t i = 0; i < experts; i += WIDE) {
        wide x = at(logits + i, 0);
        if (routing->is_sigmoid) put(logits + i, 0, sigmoid(x));
        else put(logits + i, 0, exponential(x - peak));
    }
    for (int64_t i = 0; i < experts; i++) sum += logits[i];
    if (routing->is_sigmoid && sum == sum) return; /* one NaN makes all scores NaN */
    for (int64_t i = 0; i < experts; i++) logits[i] /= sum;
}

/* Marks all experts outside the best groups as taken. */
static void take_other_groups(const Routing *routing, const float *ranked, uint8_t *taken) {
    int64_t groups = routing->groups, size = routing->experts / groups;
    float sums[groups];
    uint8_t is_best[groups];
    memset(is_best, 0, groups);
    for (int64_t g = 0; g < groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (const float *x = ranked + g * size; x < ranked + (g + 1) * size; x++) {
            if (*x > first) second = first, first = *x;
            else if (*x > second) second = *x;
        }
        sums[g] = routing->ranked_by == 1 ? first : first + second;
    }
    for (int64_t i = 0; i < routing->top_groups; i++) take_highest(sums, groups, is_best);
    for (int64_t i = 0; i < routing->experts; i++) taken[i] = !is_best[i / size];
}

static ONE_COPY void choose(const Stage *stage, int64_t row, int64_t end) {
    const Mixture *mix = stage->pass;
    const Layer *layer = stage->item;
    const Routing *routing = mix->routing;
    int64_t experts = routing->experts, top_k = routing->top_k;
    float ranked[experts];
    uint8_t taken[experts];
    for (; row < end; row++) {
        float *scores = mix->logits + row * layer->router.outputs, *weights = mix->weights + row * top_k, sum = 0;
        int32_t *chosen = mix->chosen + row * top_k;
        score(routing, scores);
        for (int64_t i = 0; i < experts; i++) ranked[i] = scores[i] + (layer->correction ? layer->correction[i] : 0);
        memset(taken, 0, experts);
        if (routing->groups > 1) take_other_groups(routing, ranked, taken);
        for (int64_t k = 0; k < top_k; k++) {
            chosen[k] = take_highest(ranked, experts, taken);
            weights[k] = scores[chosen[k]];
            sum += weights[k];
        }
        float scale = routing->scale;
        for (int64_t k = 0; k < top_k; k++)
            weights[k] = (routing->renormalizes ? weights[k] / (sum + routing->epsilon) : weights[k]) * scale;
    }
}

/* --- The GEMMs */

/* Groups the choices by expert, and sets the units of the GEMMs that follow: panels of the experts with rows. */
enum { GATE_UPS = 2, DOWNS = 4 }; /* stages after this one */
static void group_choices(const Stage *stage, int64_t unit, int64_t end) {
    const Mixture *mix = stage->pass;
    const Layer *layer = stage->item;
    int64_t experts = mix->routing->experts, choices = mix->rows * mix->routing->top_k, active = 0;
    int32_t next[experts];
    memset(mix->begins, 0, (experts + 1) * sizeof(int32_t));
    for (int64_t c = 0; c < choices; c++) mix->begins[mix->chosen[c] + 1]++;
    for (int64_t e = 0; e < experts; e++) {
        if (mix->begins[e + 1]) mix->active[active++] = e;
        mix->begins[e + 1] += mix->begins[e];
    }
    memcpy(next, mix->begins, sizeof(next));
    for (int64_t c = 0; c < choices; c++) mix->places[c] = next[mix->chosen[c]]++;
    Stage *own = (Stage *)stage;
    own[GATE_UPS].units = active * (layer->gate_ups.outputs / experts / PANEL);
    own[DOWNS].units = active * (layer->downs.outputs / experts / PANEL);
    (void)unit, (void)end;
}

static void gather(const Stage *stage, int64_t row, int64_t end) {
    const Mixture *mix = stage->pass;
    int64_t top_k = mix->routing->top_k, hidden = mix->hidden;
    for (int64_t c = row * top_k; c < end * top_k; c++)
        memcpy(mix->inputs + mix->places[c] * hidden, mix->normed + c / top_k * hidden, hidden * sizeof(float));
}

/* Units: panels of each active expert in turn. */
static void expert_gemm(const Stage *stage, int64_t unit, int64_t end) {
    const Mixture *mix = stage->pass;
    const Linear *all = stage->item;
    int64_t outputs = all->outputs / mix->routing->experts, panels = outputs / PANEL;
    while (unit < end) {
        int64_t expert = mix->active[unit / panels], first = unit % panels, begin = mix->begins[expert];
        int64_t last = end - unit < panels - first ? first + end - unit : panels;
        const float *bias = all->bias ? all->bias + expert * outputs : 0;
        const Linear own = {all->panels + expert * panels, bias, all->inputs, outputs, all->widened_from};
        gemm_panels(&own, first, last, mix->begins[expert + 1] - begin, stage->x + begin * own.inputs, 0,
                    stage->out + begin * outputs);
        unit += last - first;
    }
}

static void gate_places(const Stage *stage, int64_t place, int64_t end) {
    const Mixture *mix = stage->pass;
    int64_t size = mix->routing->size;
    for (; place < end; place++) gate(mix->activation, mix->gate_up + place * 2 * size, size, mix->gated + place * size);
}

/* The weight of the MLP that all rows share. */
static float shared_weight(const Mixture *mix, const Layer *layer, int64_t row) {
    if (!layer->shared_gate) return 1;
    float logit = dot(mix->normed + row * mix->hidden, layer->shared_gate, mix->hidden);
    return sigmoid((wide){logit})[0];
}

/* branch = the weighted sum of the experts of a row, plus the branch if all rows share an MLP. */
static ONE_COPY void combine(const Mixture *mix, const Layer *layer, int64_t row, float *branch) {
    int64_t top_k = mix->routing->top_k, outputs = layer->downs.outputs / mix->routing->experts;
    const float *weights = mix->weights + row * top_k;
    const int32_t *places = mix->places + row * top_k;
    float shared = shared_weight(mix, layer, row);
    for (int64_t i = 0; i < mix->hidden; i += WIDE) {
        wide sum = at(mix->inputs + places[0] * outputs + i, 0) * weights[0];
        for (int64_t k = 1; k < top_k; k++) sum += at(mix->inputs + places[k] * outputs + i, 0) * weights[k];
        if (layer->down.panels) sum += at(branch + i, 0) * shared;
        put(branch + i, 0, sum);
    }
}

/* The stages from the router's logits up to the outputs of the experts, which `combine` adds. None for dense layers. */
#define EXPERT_STAGES 6
static Stage *expert_stages(Stage *to, const Mixture *mix, const Layer *layer, int64_t threads) {
    if (!layer->gate_ups.panels) return to;
    int64_t rows = mix->rows, choices = rows * mix->routing->top_k, shares = 4 * threads; /* row counts vary */
    *to++ = (Stage){choose, rows, 1, threads, ROWS, mix, layer};
    *to++ = (Stage){group_choices, 1, 1, 1, ROWS, mix, layer};
    *to++ = (Stage){gather, rows, ROW_GRAIN, threads, ROWS, mix, layer};
    *to++ = (Stage){expert_gemm, 0, 1, shares, GEMM, mix, &layer->gate_ups, mix->inputs, mix->gate_up};
    *to++ = (Stage){gate_places, choices, ROW_GRAIN, threads, ROWS, mix, layer};
    *to++ = (Stage){expert_gemm, 0, 1, shares, GEMM, mix, &layer->downs, mix->gated, mix->inputs};
    return to;
}
