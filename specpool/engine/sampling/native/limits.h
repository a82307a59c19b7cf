/* Limits of sampling as minimum logits. A row is padded with -inf to whole blocks of BLOCK logits. */

#include "elementary.h"

#include <string.h>

#define BLOCK 256
#define BUCKET_BITS 11
#define BUCKETS (1 << BUCKET_BITS)
/* Largest logits of as many blocks bound the candidates of top_p. */
#define NUCLEUS_BLOCKS 32
/* Logits this far below the largest one have no mass. */
#define NO_MASS 30.0f

/* What one thread works on. */
typedef struct {
    int64_t outputs, blocks;
    float *row, *values, *weights; /* [blocks * BLOCK] each */
    float *largest;                /* [blocks]: the largest logit of each block */
    int64_t buckets[BUCKETS];
} Work;

static INLINE float max_lane(wide x) {
    float found = x[0];
    for (int i = 1; i < WIDE; i++) found = x[i] > found ? x[i] : found;
    return found;
}

/* Maps floats to integers of the same order; -0.0 maps to 0. */
static INLINE int32_t order_of_float(float x) {
    int32_t bits = bits_of_float(x);
    bits = bits == INT32_MIN ? 0 : bits;
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

/* The smallest of the values above which all values weigh less than `goal`. Reorders the values. `weights`: rounded down
   to integers; null: 1 each. */
static float smallest_within(Work *work, float *values, float *weights, int64_t count, double goal) {
    for (int64_t above = 0;;) {
        int32_t low = INT32_MAX, high = INT32_MIN;
        for (int64_t i = 0; i < count; i++) {
            int32_t order = order_of_float(values[i]);
            low = order < low ? order : low;
            high = order > high ? order : high;
        }
        if (low == high) return values[0];
        uint32_t range = (uint32_t)high - (uint32_t)low;
        int used = 32 - __builtin_clz(range), shift = used > BUCKET_BITS ? used - BUCKET_BITS : 0;
#define BUCKET(value) (((uint32_t)high - (uint32_t)order_of_float(value)) >> shift)
        memset(work->buckets, 0, sizeof(work->buckets));
        for (int64_t i = 0; i < count; i++) work->buckets[BUCKET(values[i])] += weights ? (int64_t)weights[i] : 1;
        uint32_t bucket = 0, last = range >> shift;
        while (bucket < last && (double)(above + work->buckets[bucket]) < goal) above += work->buckets[bucket++];
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++) {
            if (BUCKET(values[i]) != bucket) continue;
            if (weights) weights[kept] = weights[i];
            values[kept++] = values[i];
        }
        count = kept;
    }
}

/* The `rank`-th largest of the blocks' largest logits: at least `rank` logits reach it. -inf if there are fewer blocks. */
static float reached(Work *work, int64_t rank) {
    if (rank > work->blocks) return -INFINITY;
    memcpy(work->values, work->largest, work->blocks * sizeof(float));
    return smallest_within(work, work->values, 0, work->blocks, (double)rank);
}

/* Copies the logits >= `minimum` to `values`; returns their number. */
static int64_t gather(Work *work, float minimum) {
    int64_t count = 0;
    for (int64_t b = 0; b < work->blocks; b++) {
        if (work->largest[b] < minimum) continue;
        int64_t end = (b + 1) * BLOCK < work->outputs ? (b + 1) * BLOCK : work->outputs;
        for (int64_t i = b * BLOCK; i < end; i++) {
            work->values[count] = work->row[i];
            count += work->row[i] >= minimum;
        }
    }
    return count;
}

/* The `rank`-th largest logit, or -inf if there are fewer; `minimum` if that is larger. */
static float kth_largest(Work *work, int64_t rank, float minimum) {
    float begin = reached(work, rank);
    int64_t count = gather(work, begin > minimum ? begin : minimum);
    return count < rank ? minimum : smallest_within(work, work->values, 0, count, (double)rank);
}

/* Adds up the integer masses of a block. `ours`: which logits count. */
static INLINE int64_t block_mass(const float *x, float minimum, float best) {
    iwide high = {0}, low = {0};
    for (int i = 0; i < BLOCK; i += WIDE) {
        wide logits = at(x + i, 0);
        wide mass = masses(logits - best);
        iwide upper = CONVERT(mass * 0x1p-20f, iwide), ours = logits >= minimum;
        iwide lower = CONVERT(mass - CONVERT(upper, wide) * 0x1p20f, iwide);
        high += upper & ours;
        low += lower & ours;
    }
    int64_t total = 0;
    for (int i = 0; i < WIDE; i++) total += ((int64_t)high[i] << 20) + low[i];
    return total;
}

/* The mass of the logits >= `minimum`. */
static int64_t total_mass(const Work *work, float minimum, float best) {
    float needed = minimum > best - NO_MASS ? minimum : best - NO_MASS;
    int64_t total = 0;
    for (int64_t b = 0; b < work->blocks; b++)
        if (work->largest[b] >= needed) total += block_mass(work->row + b * BLOCK, minimum, best);
    return total;
}

/* Gathers the logits >= `minimum` with their masses; returns their number. */
static int64_t gather_masses(Work *work, float minimum, float best, int64_t *mass) {
    int64_t count = gather(work, minimum);
    for (int64_t i = 0; i < count; i += WIDE) put(work->weights + i, 0, masses(at(work->values + i, 0) - best));
    *mass = 0;
    for (int64_t i = 0; i < count; i++) *mass += (int64_t)work->weights[i];
    return count;
}

/* The smallest logit of the smallest set of most probable tokens that holds `top_p` of the logits >= `minimum`. */
static float nucleus(Work *work, float top_p, float minimum, float best) {
    double goal = (double)total_mass(work, minimum, best) * (double)top_p;
    float begin = reached(work, work->blocks < NUCLEUS_BLOCKS ? work->blocks : NUCLEUS_BLOCKS);
    int64_t mass = 0, count = 0;
    if (begin > minimum) count = gather_masses(work, begin, best, &mass);
    if (count == 0 || (double)mass < goal) {
        begin = minimum > best - NO_MASS ? minimum : best - NO_MASS;
        count = gather_masses(work, begin, best, &mass);
    }
    return smallest_within(work, work->values, work->weights, count, goal);
}
