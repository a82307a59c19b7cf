/* GEMM. Each output adds its terms in the order of the inputs, whatever the kind of the weight and the number of rows, so
   all code paths give the same bits. */

#include "pool.h"
#include "tiles.h"
#include "rounded.h"

/* Inputs of a block: all rows use its weights before the next block, while they are in the cache. */
#define BLOCK 512
#define WIDENED 256

/* Parts to prefetch ahead of the current one. */
#define AHEAD 4

/* y = W x + b. `outputs` is a multiple of PANEL. */
typedef struct {
    const Panel *panels; /* [outputs / PANEL] */
    const float *bias;   /* [outputs], or null */
    int64_t inputs, outputs;
    int64_t widened_from; /* rows from which a quantized panel is widened into the cache once, for all rows */
} Linear;

/* --- Panels of float32 or bfloat16 */

/* Adds `count` terms to the sums of PANEL outputs, which start at the bias, or at `out` if `continued`. `kind` and `rows`
   are constants at every call, which keeps the sums in registers. Prefetches the weights at `ahead`, `fetched` bytes per
   term: GEMM with few rows takes as long as reading the weights. */
static INLINE void dense_tile(int kind, int rows, int64_t count, const char *weight, const char *ahead, int64_t fetched,
                              const float *x, int64_t inputs, int continued, const float *bias, float *out,
                              int64_t outputs) {
    const float *begin = continued ? out : bias;
    int64_t step = continued ? outputs : 0;
    wide sums[TILE][PIECES];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PIECES; p++) {
            sums[r][p] = (wide){0};
            if (begin) sums[r][p] = at(begin + r * step, p);
        }
    for (int64_t k = 0; k < count; k++, weight += dense_bytes(kind), ahead += fetched) {
        for (int64_t i = 0; fetched && i < dense_bytes(kind); i += 64) __builtin_prefetch(ahead + i, 0, 2);
        for (int p = 0; p < PIECES; p++) {
            wide w = dense_weight(kind, weight, p);
            for (int r = 0; r < rows; r++) sums[r][p] += w * x[r * inputs + k];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PIECES; p++) put(out + r * outputs, p, sums[r][p]);
}

/* 1 to TILE rows. */
static INLINE void dense_rows(int kind, int64_t rows, int64_t count, const char *weight, const char *ahead,
                              int64_t fetched, const float *x, int64_t inputs, int continued, const float *bias,
                              float *out, int64_t outputs) {
#define OF_ROWS(n) dense_tile(kind, n, count, weight, ahead, fetched, x, inputs, continued, bias, out, outputs); break;
    BY_ROWS(rows)
#undef OF_ROWS
}

/* out [rows, outputs] of one panel. */
static INLINE void dense_panel(int kind, const char *weight, int64_t inputs, int64_t rows, const float *x,
                               const float *bias, float *out, int64_t outputs) {
    int64_t blocks = (inputs + BLOCK - 1) / BLOCK, block = (inputs + blocks - 1) / blocks, bytes = dense_bytes(kind);
    int64_t fetched = bytes / ((rows + TILE - 1) / TILE);
    for (int64_t k = 0; k < inputs; k += block) {
        int64_t count = inputs - k < block ? inputs - k : block;
        const char *from = weight + k * bytes;
        for (int64_t row = 0; row < rows; row += TILE)
            dense_rows(kind, rows - row < TILE ? rows - row : TILE, count, from,
                       from + count * (bytes + row / TILE * fetched), fetched, x + row * inputs + k, inputs, k > 0,
                       bias, out + row * outputs, outputs);
    }
}

/* --- Quantized panels */

/* Adds the terms of parts `part` to `end` to the sums of `rows` rows and `abreast` panels. The sums start at the bias for
   part 0, else at `out`. Widens weights in registers, and writes them to `wide_weights`, [inputs, PANEL], unless null.
   `kind`, `rows`, `abreast` and whether `wide_weights` is null are constants at every call. */
static INLINE void quantized_tile(int kind, int rows, int abreast, const Panel *panels, int64_t part, int64_t end,
                              float *wide_weights, const float *x, int64_t inputs, const float *bias, float *out,
                              int64_t outputs) {
    wide sums[TILE * ABREAST][PIECES];
    for (int s = 0; s < rows * abreast; s++)
        for (int p = 0; p < PIECES; p++) {
            sums[s][p] = (wide){0};
            if (part) sums[s][p] = at(out + s / abreast * outputs + s % abreast * PANEL, p);
            else if (bias) sums[s][p] = at(bias + s % abreast * PANEL, p);
        }
    for (x += part * PART; part < end; part++, x += PART)
        for (int first = 0; first < PART; first += inputs_of(kind)) {
            Scales scales[ABREAST];
            const char *codes[ABREAST];
            for (int a = 0; a < abreast; a++) {
                scales[a] = scales_of(kind, panels[a].weight, part, first);
                codes[a] = part_at(kind, panels[a].weight, part) + own_of(kind);
            }
            ROLLED
            for (int group = first / GROUP; group < (first + inputs_of(kind)) / GROUP; group++) {
                int64_t bytes = part_bytes(kind) * GROUP / PART;
                for (int a = 0; a < abreast; a++)
                    for (int64_t i = 0; i < bytes; i += 64)
                        __builtin_prefetch(codes[a] + AHEAD * part_bytes(kind) + group * bytes + i, 0, 2);
                UNROLLED
                for (int i = 0; i < GROUP; i++)
                    for (int s = 0; s < abreast * PIECES; s++) {
                        int a = s / PIECES, p = s % PIECES;
                        wide w = weight_of(kind, codes[a], &scales[a], p, group, i);
                        if (wide_weights) put(wide_weights + i * PANEL, p, w);
                        for (int r = 0; r < rows; r++) sums[r * abreast + a][p] += w * x[r * inputs + group * GROUP + i];
                    }
                if (wide_weights) wide_weights += GROUP * PANEL;
            }
        }
    for (int s = 0; s < rows * abreast; s++)
        for (int p = 0; p < PIECES; p++) put(out + s / abreast * outputs + s % abreast * PANEL, p, sums[s][p]);
}

/* Widens `parts` parts of a panel to float32, [parts * PART, PANEL]. */
static INLINE void widen(int kind, const char *panel, int64_t part, int64_t parts, float *to) {
    for (int64_t end = part + parts; part < end; part++)
        for (int first = 0; first < PART; first += inputs_of(kind)) {
            Scales scales = scales_of(kind, panel, part, first);
            const char *codes = part_at(kind, panel, part) + own_of(kind);
            ROLLED
            for (int group = first / GROUP; group < (first + inputs_of(kind)) / GROUP; group++)
                UNROLLED
                for (int i = 0; i < GROUP; i++, to += PANEL)
                    for (int p = 0; p < PIECES; p++)
                        put(to, p, weight_of(kind, codes, &scales, p, group, i));
        }
}

/* Not inlined: one copy serves all kinds. */
static __attribute__((noinline)) void float_rows(int64_t rows, int64_t count, const float *weight, const float *x,
                                                 int64_t inputs, int continued, const float *bias, float *out,
                                                 int64_t outputs) {
    const char *at = (const char *)weight;
    for (int64_t row = 0; row < rows; row += TILE, x += TILE * inputs, out += TILE * outputs)
        dense_rows(FLOAT32, rows - row < TILE ? rows - row : TILE, count, at, at, 0, x, inputs, continued, bias, out,
                   outputs);
}

/* out [rows, outputs] of one panel, for more than TILE rows. The first TILE rows widen the weights into the cache for the
   others. */
static INLINE void widened_panel(int kind, const Panel *panel, int64_t inputs, int64_t rows, const float *x,
                                const float *bias, float *out, int64_t outputs) {
    float floats[WIDENED * PANEL];
    for (int64_t k = 0; k < inputs; k += WIDENED) {
        int64_t count = inputs - k < WIDENED ? inputs - k : WIDENED;
        quantized_tile(kind, TILE, 1, panel, k / PART, (k + count) / PART, floats, x, inputs, bias, out, outputs);
        float_rows(rows - TILE, count, floats, x + TILE * inputs + k, inputs, k > 0, bias, out + TILE * outputs, outputs);
    }
}

/* out [rows, outputs] of one panel, from rounded activations. */
static INLINE void rounded_panel(int kind, const char *panel, int64_t parts, int64_t rows, const RoundedPart *x,
                                 const float *bias, float *out, int64_t outputs) {
    for (int64_t row = 0; row < rows; row += TILE, x += TILE, out += TILE * outputs)
#define OF_ROWS(n) rounded_tile(kind, n, panel, parts, x, rows, bias, out, outputs); break;
        BY_ROWS(rows - row)
#undef OF_ROWS
}

/* Computes up to `count` panels of one kind. Returns the number computed. */
static INLINE int quantized_panels(int kind, const Panel *panels, int count, const Linear *linear, int64_t rows,
                                   const float *x, const RoundedPart *rounded, const float *bias, float *out) {
    int64_t inputs = linear->inputs, outputs = linear->outputs, end = inputs / PART;
    if (ROUND_ACTIVATIONS) {
        rounded_panel(kind, panels->weight, end, rows, rounded, bias, out, outputs);
        return 1;
    }
    if (rows > TILE && rows >= linear->widened_from) {
        widened_panel(kind, panels, inputs, rows, x, bias, out, outputs);
        return 1;
    }
#if ABREAST > 1
    if (rows == 1 && count > 2) {
        quantized_tile(kind, 1, 3, panels, 0, end, 0, x, inputs, bias, out, outputs);
        return 3;
    }
    if (rows == 1 && count > 1) {
        quantized_tile(kind, 1, 2, panels, 0, end, 0, x, inputs, bias, out, outputs);
        return 2;
    }
    if (rows == 2 && count > 1) {
        quantized_tile(kind, 2, 2, panels, 0, end, 0, x, inputs, bias, out, outputs);
        return 2;
    }
#endif
    for (int64_t row = 0; row < rows; row += TILE, x += TILE * inputs, out += TILE * outputs)
#define OF_ROWS(n) quantized_tile(kind, n, 1, panels, 0, end, 0, x, inputs, bias, out, outputs); break;
        BY_ROWS(rows - row)
#undef OF_ROWS
    return 1;
}

/* --- All kinds. KINDS(X) lists the kinds that this library is compiled for: X(FLOAT32) X(Q4_1) ... */

/* One function per kind, to limit register pressure and compile time. */
#define OF_KIND(kind) \
    static __attribute__((noinline)) int panels_##kind(const Panel *panels, int count, const Linear *linear, \
                                                       int64_t rows, const float *x, const RoundedPart *rounded, \
                                                       const float *bias, float *out) { \
        if (!is_dense(kind)) return quantized_panels(kind, panels, count, linear, rows, x, rounded, bias, out); \
        dense_panel(kind, panels->weight, linear->inputs, rows, x, bias, out, linear->outputs); \
        return 1; \
    }
KINDS(OF_KIND)

/* Panels `next` to `end` of to [rows, outputs] = W x + b, for x [rows, inputs]. `rounded`: the same rows, rounded.
   Compiled once: probes run the same code as a pass. */
static ONE_COPY void gemm_panels(const Linear *linear, int64_t next, int64_t end, int64_t rows, const float *x,
                                 const RoundedPart *rounded, float *to) {
    while (next < end) {
        const Panel *first = linear->panels + next;
        const float *bias = linear->bias ? linear->bias + next * PANEL : 0;
        float *out = to + next * PANEL;
        int count = 1;
        while (count < ABREAST && next + count < end && first[count].kind == first->kind) count++;
        switch (first->kind) {
#define WITH_KIND(kind) \
        case kind: next += panels_##kind(first, count, linear, rows, x, rounded, bias, out); break;
            KINDS(WITH_KIND)
        default: __builtin_trap(); /* not compiled */
        }
    }
}

static void gemm(const Stage *stage, int64_t next, int64_t end) {
    gemm_panels(stage->item, next, end, stage->rows, stage->x, stage->pass, stage->out);
}

/* The weights of one output, [inputs]. */
static ONE_COPY void embedding_row(const Linear *linear, int64_t output, float *out) {
    const Panel *panel = linear->panels + output / PANEL;
    int lane = output % PANEL;
    float floats[WIDENED * PANEL];
    for (int64_t k = 0; k < linear->inputs; k += WIDENED) {
        int64_t count = linear->inputs - k < WIDENED ? linear->inputs - k : WIDENED;
        switch (panel->kind) {
#define TO_FLOAT(kind) \
        case kind: \
            if (!is_dense(kind)) widen(kind, panel->weight, k / PART, count / PART, floats); \
            else for (int64_t i = 0; i < count * PIECES; i++) { \
                const char *from = panel->weight + (k + i / PIECES) * dense_bytes(kind); \
                put(floats + i / PIECES * PANEL, i % PIECES, dense_weight(kind, from, i % PIECES)); \
            } \
            break;
            KINDS(TO_FLOAT)
        default: __builtin_trap(); /* not compiled */
        }
        for (int64_t i = 0; i < count; i++) out[k + i] = floats[i * PANEL + lane];
    }
}
