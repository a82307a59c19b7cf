/* Runs the compiled pass on a random model and prints logits, for processors that need an emulator.

   The first line is the number of rows of logits that differ between passes of one row and of many. The others are the
   logits of the last row. Needs the macros of decoder.c, and KIND: the kind of most panels, dense or with a scale per
   part. Other panels are FLOAT32. Both must be in KINDS. */

#include "../../../../specpool/engine/passes/native/decoder.c"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 3, HIDDEN = 6 * LANES, INTERMEDIATE = 10 * LANES, KV_HEADS = 2, VOCABULARY = 3 * PANEL, TOKENS = 40, PAGES = 3, WIDENED_FROM = 8,
       EXPERTS = 6, EXPERT_SIZE = 3 * LANES, KEY_HEADS = 2, VALUE_HEADS = 4, KEY_SIZE = 2 * LANES, VALUE_SIZE = 5 * LANES, TAPS = 4,
       FEATURES = 2 * KEY_HEADS * KEY_SIZE + VALUE_HEADS * VALUE_SIZE };

static uint64_t state = 1;

static float uniform(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(state >> 40) / (1 << 24) - 0.5f;
}

static uint32_t bits_of_float(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof(bits));
    return bits;
}

static float *floats(int64_t count, float size, float middle) {
    float *found = malloc(count * sizeof(float));
    for (int64_t i = 0; i < count; i++) found[i] = middle + size * uniform();
    return found;
}

/* PANEL float16 numbers. */
static void put_halves(char *to, float size, float middle) {
    for (int i = 0; i < PANEL; i++) {
        uint32_t bits = bits_of_float(middle + size * uniform());
        uint16_t half = (bits >> 16 & 0x8000) | ((bits >> 13 & 0x3ffff) - (112 << 10));
        memcpy(to + 2 * i, &half, 2);
    }
}

/* Random weights of a panel, or weights that bfloat16 holds. */
static Panel panel(int kind, int64_t inputs) {
    if (is_dense(kind)) {
        char *weight = malloc(inputs * dense_bytes(kind));
        for (int64_t i = 0; i < inputs * PANEL; i++) {
            uint32_t bits = bits_of_float(0.4f * uniform()) & 0xffff0000u;
            uint16_t half = bits >> 16;
            if (kind == BFLOAT16) memcpy(weight + 2 * i, &half, 2);
            else memcpy(weight + 4 * i, &bits, 4);
        }
        return (Panel){weight, kind};
    }
    int64_t parts = inputs / PART;
    char *weight = malloc(parts * part_bytes(kind));
    float codes = 1 << bits_of(kind);
    for (int64_t i = 0; i < parts * part_bytes(kind); i++) weight[i] = (int)(256 * uniform());
    for (int64_t part = 0; part < parts; part++) {
        char *own = weight + part * part_bytes(kind);
        put_halves(own, 0.2f / codes, 0.4f / codes);
        if (has_offset(kind)) put_halves(own + HALF_WORDS, 0.1f, -0.2f);
    }
    return (Panel){weight, kind};
}

/* Kinds lay out panels differently, so the same random numbers give different layers for each kind. */
static Linear linear_of_kind(int kind, int64_t inputs, int64_t outputs) {
    Panel *panels = malloc(outputs / PANEL * sizeof(Panel));
    for (int64_t i = 0; i < outputs / PANEL; i++) panels[i] = panel(i % 5 == 3 ? FLOAT32 : kind, inputs);
    return (Linear){panels, floats(outputs, 0.1f, 0), inputs, outputs, WIDENED_FROM};
}

static Linear linear(int64_t inputs, int64_t outputs) { return linear_of_kind(KIND, inputs, outputs); }

/* The recurrence of a pass. All rows but the first are drafts, which the next pass replays from the checkpoint before them. */
static Segment segment(int64_t first, int64_t rows) {
    static Segment last;
    last = (Segment){.rows = rows, .start = first, .read = first ? last.write : -1,
                     .read_position = first ? last.write_position : 0, .read_tail = last.write_tail,
                     .write = !last.write, .write_position = first + 1, .write_tail = !last.write_tail};
    return last;
}

static void pass(const Model *model, int64_t first, int64_t rows, const int64_t *tokens, float *logits) {
    int64_t positions[TOKENS], result_rows[TOKENS];
    for (int64_t row = 0; row < rows; row++) positions[row] = first + row, result_rows[row] = row;
    int64_t scores = (first + rows + LANES - 1) / LANES * LANES, threads = 3;
    float *workspace = malloc((workspace_floats(model, rows) + threads * (GROUPS * scores + scores / LANES)) * sizeof(float));
    static const int64_t none[TOKENS]; /* all rows are in slot 0, and none is of a branch */
    Batch batch = {rows, rows,        threads,   tokens + first, positions, none,
                   none, none, result_rows, workspace, scores,         logits};
    const Segment own = segment(first, rows);
    batch.num_segments = 1, batch.segments = &own;
    forward(model, &batch);
    free(workspace);
}

int main(void) {
    int64_t heads = (GROUPS * KV_HEADS + 2 * KV_HEADS) * HEAD_DIM, cache = KV_HEADS * PAGES * LANES * HEAD_DIM;
    static const int32_t table[PAGES] = {2, 0, 1};
    Layer layers[LAYERS];
    for (int i = 0; i < LAYERS; i++)
        layers[i] = (Layer){.query_key_value = linear(HIDDEN, (heads + PANEL - 1) / PANEL * PANEL),
                            .out = linear(GROUPS * KV_HEADS * HEAD_DIM, HIDDEN),
                            .gate_up = linear(HIDDEN, 2 * INTERMEDIATE),
                            .down = linear(INTERMEDIATE, HIDDEN),
                            .before_attention = floats(HIDDEN, 0.2f, 1),
                            .before_mlp = floats(HIDDEN, 0.2f, 1),
                            .keys = calloc(cache, sizeof(float)),
                            .values = calloc(cache, sizeof(float))};
    Layer *delta = layers + 1; /* instead of attention */
    delta->inputs = linear(HIDDEN, (FEATURES + VALUE_HEADS * (VALUE_SIZE + 2) + PANEL - 1) / PANEL * PANEL);
    delta->out = linear(VALUE_HEADS * VALUE_SIZE, HIDDEN);
    delta->taps = floats(TAPS * FEATURES, 1, 0);
    delta->rate = floats(VALUE_HEADS, 1, -1);
    delta->dt_bias = floats(VALUE_HEADS, 1, 0);
    delta->gate_norm = floats(VALUE_SIZE, 0.2f, 1);
    delta->states = calloc(2 * VALUE_HEADS * KEY_SIZE * VALUE_SIZE, sizeof(float));
    delta->edges = calloc(2 * (TAPS - 1) * FEATURES, sizeof(float));
    delta->tail_inputs = calloc(2 * TOKENS * FEATURES, sizeof(float));
    delta->tail_gates = calloc(2 * TOKENS * 2 * VALUE_HEADS, sizeof(float));
    layers[0].is_gated = 1;
    layers[0].query_key_value = linear(HIDDEN, (heads + GROUPS * KV_HEADS * HEAD_DIM + PANEL - 1) / PANEL * PANEL);
    Layer *mixture = layers + LAYERS - 1; /* besides its MLP for all rows */
    mixture->router = linear_of_kind(FLOAT32, HIDDEN, PANEL);
    mixture->gate_ups = linear_of_kind(FLOAT32, HIDDEN, EXPERTS * 2 * EXPERT_SIZE);
    mixture->downs = linear_of_kind(FLOAT32, EXPERT_SIZE, EXPERTS * HIDDEN);
    mixture->correction = floats(EXPERTS, 0.2f, 0);
    mixture->sinks = floats(GROUPS * KV_HEADS, 1, 0);
    mixture->shared_gate = floats(HIDDEN, 0.2f, 0);
    mixture->window = LANES + 3;
    mixture->softcap = 2;
    float *cosines = malloc(TOKENS * HEAD_DIM * sizeof(float)), *sines = malloc(TOKENS * HEAD_DIM * sizeof(float));
    for (int64_t i = 0; i < TOKENS * HEAD_DIM; i++) cosines[i] = uniform(), sines[i] = uniform();
    Rotary rotary = {cosines, sines};
    Model model = {.layers = layers, .num_layers = LAYERS, .hidden = HIDDEN, .intermediate = INTERMEDIATE,
                   .kv_heads = KV_HEADS, .columns = PAGES * LANES, .tables = table, .table_size = PAGES,
                   .page_size = LANES, .rotaries = &rotary, .embedding_scale = 1,
                   .norm = floats(HIDDEN, 0.2f, 1), .embedding = linear(HIDDEN, VOCABULARY),
                   .head = linear(HIDDEN, VOCABULARY), .eps = 1e-6f, .scaling = 0.25f, .activation = {.alpha = 1, .limit = INFINITY},
                   .routing = {.experts = EXPERTS, .top_k = 2, .groups = 3, .top_groups = 2, .is_sigmoid = 1,
                               .renormalizes = 1, .size = EXPERT_SIZE, .scale = 1.5f, .epsilon = 1e-20f},
                   .recurrence = {KEY_HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE, TAPS, FEATURES, TOKENS}};
    int64_t tokens[TOKENS];
    for (int i = 0; i < TOKENS; i++) tokens[i] = (int64_t)(state % VOCABULARY), uniform();

    static float alone[TOKENS][VOCABULARY], together[TOKENS][VOCABULARY];
    for (int at = 0; at < TOKENS; at++) pass(&model, at, 1, tokens, alone[at]);
    int different = 0, sizes[] = {2, 3, 4, 5, 6, 7, 8, 9, 16, 37, TOKENS};
    for (unsigned s = 0; s < sizeof(sizes) / sizeof(*sizes); s++) {
        for (int at = 0; at < TOKENS; at += sizes[s])
            pass(&model, at, sizes[s] < TOKENS - at ? sizes[s] : TOKENS - at, tokens, together[at]);
        for (int row = 0; row < TOKENS; row++) different += memcmp(alone[row], together[row], sizeof(alone[row])) != 0;
    }
    printf("%d\n", different);
    for (int i = 0; i < VOCABULARY; i++) printf("%.9g\n", alone[TOKENS - 1][i]);
    return 0;
}
