/* Runs the compiled pass on a random model and prints logits: for processors that only an emulator has here.

   The first line is how many rows of logits differ between passes of one row and passes of many; the others are the
   logits of the last row. Compiled with the same macros as decoder.c. */

#include "../../../engine/passes/native/decoder.c"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 2, HIDDEN = 6 * LANES, INTERMEDIATE = 10 * LANES, KV_HEADS = 2, VOCABULARY = 3 * PANEL, TOKENS = 70 };

static uint64_t state = 1;

static float uniform(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(state >> 40) / (1 << 24) - 0.5f;
}

/* Random weights that bfloat16 holds. */
static Weight *weights(int64_t count, float size, float middle) {
    Weight *weight = malloc(count * sizeof(Weight));
    for (int64_t i = 0; i < count; i++) {
        union {
            float number;
            uint32_t bits;
        } rounded = {middle + size * uniform()};
        rounded.bits &= 0xffff0000u;
#ifdef BFLOAT16
        weight[i] = rounded.bits >> 16;
#else
        weight[i] = rounded.number;
#endif
    }
    return weight;
}

/* Its outputs are in panels, whose halves lie in another order as bfloat16: for random weights another random layer,
   so that the two kinds of weights are not to be compared. */
static Linear linear(int64_t inputs, int64_t outputs) {
    return (Linear){weights(inputs * outputs, 0.4f, 0), weights(outputs, 0.1f, 0), inputs, outputs};
}

static void pass(const Model *model, int64_t first, int64_t rows, const int64_t *tokens, float *logits) {
    int64_t positions[TOKENS], wanted[TOKENS];
    for (int64_t row = 0; row < rows; row++) positions[row] = first + row, wanted[row] = row;
    int64_t scores = (first + rows + LANES - 1) / LANES * LANES, threads = 3;
    float *workspace = malloc((workspace_floats(model, rows) + threads * GROUPS * scores) * sizeof(float));
    Batch batch = {rows, rows, threads, tokens + first, positions, positions, wanted, workspace, scores, logits};
    forward(model, &batch);
    free(workspace);
}

int main(void) {
    int64_t heads = (GROUPS * KV_HEADS + 2 * KV_HEADS) * HEAD_DIM, cache = KV_HEADS * TOKENS * HEAD_DIM;
    Layer layers[LAYERS];
    for (int i = 0; i < LAYERS; i++)
        layers[i] = (Layer){.query_key_value = linear(HIDDEN, (heads + PANEL - 1) / PANEL * PANEL),
                            .out = linear(GROUPS * KV_HEADS * HEAD_DIM, HIDDEN),
                            .gate_up = linear(HIDDEN, 2 * INTERMEDIATE),
                            .down = linear(INTERMEDIATE, HIDDEN),
                            .before_attention = weights(HIDDEN, 0.2f, 1),
                            .before_mlp = weights(HIDDEN, 0.2f, 1),
                            .keys = calloc(cache, sizeof(float)),
                            .values = calloc(cache, sizeof(float))};
    float *cosines = malloc(TOKENS * HEAD_DIM * sizeof(float)), *sines = malloc(TOKENS * HEAD_DIM * sizeof(float));
    for (int64_t i = 0; i < TOKENS * HEAD_DIM; i++) cosines[i] = uniform(), sines[i] = uniform();
    Model model = {layers,  LAYERS, HIDDEN, INTERMEDIATE, KV_HEADS, TOKENS, cosines,
                   sines,   0,      weights(HIDDEN, 0.2f, 1), linear(HIDDEN, VOCABULARY), 1e-6f, 0.25f};
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
