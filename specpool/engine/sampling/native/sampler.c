/* Chooses a token for each row of logits, with its log-probabilities, on the threads of pool.h.

   A row is computed on its own, by operations that round the same way on every processor and in the order of
   `sampler.py`, `logprobs.py` and `kernel.py`, so all of them give the same bits. */

#include "limits.h"
#include "pool.h"
#include "sampling.h"

int64_t workspace_floats(int64_t outputs) {
    int64_t blocks = (outputs + BLOCK - 1) / BLOCK;
    return 3 * blocks * BLOCK + blocks;
}

/* The largest of a row's logits, whether any is NaN, and in `largest` the largest of each block. */
typedef struct {
    float best;
    int has_nan;
} Extremes;

static Extremes scan(Work *work) {
    Extremes found = {-INFINITY, 0};
    for (int64_t b = 0; b < work->blocks; b++) {
        const float *x = work->row + b * BLOCK;
        wide most = (wide){0} - INFINITY;
        iwide unordered = {0};
        for (int i = 0; i < BLOCK; i += WIDE) {
            most = larger(at(x + i, 0), most);
            unordered |= at(x + i, 0) != at(x + i, 0);
        }
        work->largest[b] = max_lane(most);
        found.best = work->largest[b] > found.best ? work->largest[b] : found.best;
        for (int i = 0; i < WIDE; i++) found.has_nan |= unordered[i];
    }
    return found;
}

static int has_changes(const Row *row) {
    return row->num_biases || row->num_masked || row->num_counted || row->allowed;
}

/* Whether the largest allowed logit wins. Such rows need no copy of the logits. */
static int is_masked_argmax(const Row *row) {
    return row->allowed && row->temperature == 0 && !(row->num_biases || row->num_masked || row->num_counted);
}

/* Points `work` to the logits of a row, or to a copy if they will change or need padding. */
static Extremes load(Work *work, const Row *row) {
    int64_t padded = work->blocks * BLOCK;
    int is_argmax = is_masked_argmax(row) || (row->kind == GREEDY && !has_changes(row));
    if (is_argmax && padded == work->outputs) {
        work->row = (float *)row->logits;
        return scan(work);
    }
    memcpy(work->row, row->logits, work->outputs * sizeof(float));
    for (int64_t i = work->outputs; i < padded; i++) work->row[i] = -INFINITY;
    return scan(work);
}

/* --- Bias, masks and penalties */

static int32_t output_of(const Batch *batch, int32_t token_id) {
    return token_id >= 0 && token_id < batch->vocabulary ? batch->outputs_of[token_id] : -1;
}

/* Writes the logits of a block's allowed tokens, and -inf for the others. Returns whether any is allowed. */
static int mask(const Batch *batch, int64_t block, const uint32_t *allowed, const float *logits, float *masked) {
    const int32_t *ids = batch->token_ids + block * BLOCK;
    uint32_t any = 0;
    if (batch->runs[block]) {
        for (int w = 0; w < BLOCK / 32; w++) {
            uint32_t word = allowed[(ids[0] >> 5) + w];
            any |= word;
            for (int i = 0; i < 32; i++) masked[32 * w + i] = word >> i & 1 ? logits[32 * w + i] : -INFINITY;
        }
    } else
        for (int i = 0; i < BLOCK; i++) {
            uint32_t is_allowed = allowed[ids[i] >> 5] >> (ids[i] & 31) & 1;
            any |= is_allowed;
            masked[i] = is_allowed ? logits[i] : -INFINITY;
        }
    return any != 0;
}

static void adjust(Work *work, const Row *row, const Batch *batch) {
    for (int64_t i = 0; i < row->num_biases; i++) {
        int32_t output = output_of(batch, row->bias_ids[i]);
        if (output >= 0) work->row[output] += row->biases[i];
    }
    for (int64_t i = 0; i < row->num_masked; i++) {
        int32_t output = output_of(batch, row->masked_ids[i]);
        if (output >= 0) work->row[output] = -INFINITY;
    }
    for (int64_t b = 0; row->allowed && b < work->blocks; b++)
        mask(batch, b, row->allowed, work->row + b * BLOCK, work->row + b * BLOCK);
    for (int64_t i = 0; i < row->num_counted; i++) {
        int32_t output = output_of(batch, row->counted_ids[i]), count = row->counts[i];
        if (output < 0 || count < 0) continue;
        float value = work->row[output];
        value = value < 0 ? value * row->repetition : value / row->repetition;
        if (count) value -= row->frequency * (float)count + row->presence;
        work->row[output] = value;
    }
}

static void divide(Work *work, float temperature) {
    if (temperature == 1.0f) return;
    for (int64_t i = 0; i < work->blocks * BLOCK; i += WIDE) put(work->row + i, 0, at(work->row + i, 0) / temperature);
    for (int64_t b = 0; b < work->blocks; b++) work->largest[b] /= temperature;
}

/* --- Choice */

/* The smallest token with this logit, or the first output if `greedy`. NaN if `best` is NaN. */
static int64_t output_with(const Work *work, float best, const int32_t *token_ids, int greedy) {
    int64_t found = -1;
    for (int64_t b = 0; b < work->blocks; b++) {
        if (work->largest[b] != best && best == best) continue;
        int64_t end = (b + 1) * BLOCK < work->outputs ? (b + 1) * BLOCK : work->outputs;
        for (int64_t i = b * BLOCK; i < end; i++) {
            float x = work->row[i];
            if (best == best ? x != best : x == x) continue;
            if (greedy) return i;
            if (found < 0 || token_ids[i] < token_ids[found]) found = i;
        }
    }
    return found;
}

/* The output with the largest sum of logit and noise, among logits >= `minimum`. The smallest token wins ties. */
static int64_t output_with_noise(const Work *work, const Row *row, int64_t start, float minimum,
                                 const int32_t *token_ids) {
    uint32_t first = row->first_key, second = row->second_key;
    int64_t found = start;
    float best = work->row[start] + gumbel(noise_bits((uwide){0} + token_ids[start], first, second)[0]);
    for (int64_t b = 0; b < work->blocks; b++) {
        if (work->largest[b] < minimum || work->largest[b] + MAX_NOISE < best) continue;
        const float *x = work->row + b * BLOCK;
        const int32_t *ids = token_ids + b * BLOCK;
        uint32_t bits[BLOCK];
        float bounds[BLOCK];
        wide most = (wide){0} - INFINITY;
        for (int i = 0; i < BLOCK; i += WIDE) {
            uwide hashed = noise_bits(*(const uwide *)(ids + i), first, second);
            wide bound = at(x + i, 0) + noise_bound(hashed);
            *(uwide *)(bits + i) = hashed;
            put(bounds + i, 0, bound);
            most = larger(bound, most);
        }
        if (max_lane(most) < best) continue;
        for (int i = 0; i < BLOCK; i++) {
            if (bounds[i] < best || x[i] < minimum || b * BLOCK + i >= work->outputs) continue;
            float sum = x[i] + gumbel(bits[i]);
            if (sum < best || (sum == best && ids[i] >= token_ids[found])) continue;
            best = sum;
            found = b * BLOCK + i;
        }
    }
    return found;
}

/* The output with the largest allowed logit. The smallest token id wins ties. -1 if all of them are -inf. */
static int64_t largest_allowed(const Work *work, const uint32_t *allowed, const Batch *batch) {
    int64_t found = -1;
    float best = -INFINITY;
    for (int64_t b = 0; b < work->blocks; b++) {
        if (work->largest[b] < best) continue;
        float masked[BLOCK];
        const int32_t *ids = batch->token_ids + b * BLOCK;
        if (!mask(batch, b, allowed, work->row + b * BLOCK, masked)) continue; /* padding is -inf */
        wide most = (wide){0} - INFINITY;
        for (int i = 0; i < BLOCK; i += WIDE) most = larger(at(masked + i, 0), most);
        if (max_lane(most) < best) continue;
        for (int i = 0; i < BLOCK; i++) {
            if (masked[i] < best || masked[i] == -INFINITY) continue;
            if (masked[i] == best && ids[i] >= batch->token_ids[found]) continue;
            best = masked[i];
            found = b * BLOCK + i;
        }
    }
    return found;
}

static float minimum_of(Work *work, const Row *row, float best) {
    float minimum = -INFINITY;
    if (!isfinite(best)) return minimum;
    if (row->log_min_p > -INFINITY) minimum = best + row->log_min_p;
    if (row->top_k > 0) minimum = kth_largest(work, row->top_k, minimum);
    if (row->top_p < 1) {
        float limit = nucleus(work, row->top_p, minimum, best);
        minimum = limit > minimum ? limit : minimum;
    }
    return minimum;
}

/* The chosen output. `extremes`: of the unchanged logits, which are in `row`. -1: all logits are -inf. */
static int64_t choose(Work *work, const Row *row, Extremes extremes, const Batch *batch) {
    if (is_masked_argmax(row) && !extremes.has_nan) return largest_allowed(work, row->allowed, batch);
    if (has_changes(row)) {
        adjust(work, row, batch);
        extremes = scan(work);
    }
    if (extremes.has_nan) return output_with(work, NAN, batch->token_ids, row->kind == GREEDY);
    if (row->kind == GREEDY) return output_with(work, extremes.best, batch->token_ids, 1);
    if (extremes.best == -INFINITY) return -1;
    if (row->temperature == 0) return output_with(work, extremes.best, batch->token_ids, 0);
    float best = extremes.best / row->temperature;
    divide(work, row->temperature);
    float minimum = minimum_of(work, row, best);
    return output_with_noise(work, row, output_with(work, best, batch->token_ids, 0), minimum, batch->token_ids);
}

/* --- Log-probabilities */

/* The logarithm of the sum of exp(logit - best). */
static float log_sum(const Work *work, float best) {
    return -negative_log((float)(double)total_mass(work, -INFINITY, best) * 0x1p-40f);
}

static int comes_before(float logit, int32_t token_id, const Row *row, int64_t place) {
    float other = row->top_logprobs[place];
    return logit > other || (logit == other && token_id < row->top_ids[place]);
}

/* Stores the most probable tokens of an unchanged row, the smaller token first in ties. */
static void store_top(Work *work, const Row *row, float best, float log_total, const int32_t *token_ids) {
    int64_t count = 0, wanted = row->num_top;
    float minimum = wanted ? kth_largest(work, wanted, -INFINITY) : INFINITY;
    for (int64_t i = 0; i < work->outputs; i++) {
        if ((i % BLOCK == 0) && work->largest[i / BLOCK] < minimum) {
            i += BLOCK - 1;
            continue;
        }
        float x = work->row[i];
        if (!(x >= minimum)) continue;
        int64_t place = count;
        while (place && comes_before(x, token_ids[i], row, place - 1)) place--;
        if (place == wanted) continue;
        int64_t moved = (count < wanted ? count++ : wanted - 1) - place;
        memmove(row->top_ids + place + 1, row->top_ids + place, moved * sizeof(int32_t));
        memmove(row->top_logprobs + place + 1, row->top_logprobs + place, moved * sizeof(float));
        row->top_ids[place] = token_ids[i];
        row->top_logprobs[place] = x;
    }
    for (int64_t i = 0; i < count; i++) row->top_logprobs[i] = row->top_logprobs[i] - best - log_total;
}

static void sample(const Batch *batch, Row *row, Work *work) {
    if (__atomic_load_n(&batch->rejected[row->sequence], __ATOMIC_RELAXED) < row->position) {
        row->token = -1;
        return;
    }
    float *copy = work->row;
    Extremes extremes = load(work, row);
    row->is_finite = isfinite(extremes.best) && !extremes.has_nan;
    float log_total = NAN;
    if (row->num_top >= 0 && row->is_finite) {
        log_total = log_sum(work, extremes.best);
        store_top(work, row, extremes.best, log_total, batch->token_ids);
    }
    int64_t output = choose(work, row, extremes, batch);
    work->row = copy;
    row->token = output < 0 ? 0 : batch->token_ids[output];
    if (output < 0) output = output_of(batch, 0);
    row->logprob = (output < 0 ? -INFINITY : row->logits[output]) - extremes.best - log_total;
    if (row->expected < 0 || row->token == row->expected) return;
    int32_t *rejected = &batch->rejected[row->sequence], before = __atomic_load_n(rejected, __ATOMIC_RELAXED);
    while (row->position < before &&
           !__atomic_compare_exchange_n(rejected, &before, row->position, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

static const Pool *pool_of(const Batch *batch) { return batch->pool ? batch->pool : &own_pool; }

static void sample_rows(const Stage *stage, int64_t row, int64_t end) {
    const Batch *batch = stage->pass;
    Work work = {.outputs = batch->outputs, .blocks = (batch->outputs + BLOCK - 1) / BLOCK};
    work.row = batch->workspace + pool_of(batch)->thread() * workspace_floats(batch->outputs);
    work.values = work.row + work.blocks * BLOCK;
    work.weights = work.values + work.blocks * BLOCK;
    work.largest = work.weights + work.blocks * BLOCK;
    for (; row < end; row++) sample(batch, batch->rows + row, &work);
}

void sample_batch(const Batch *batch) {
    Stage stage = {sample_rows, batch->num_rows, 1, batch->num_rows, .pass = batch};
    pool_of(batch)->run(&stage, &stage + 1, batch->threads);
}

/* The noise of `count` tokens, a multiple of BLOCK, and its upper bounds. */
void noise(int64_t count, const int32_t *token_ids, uint32_t first, uint32_t second, float *exact, float *bounds) {
    for (int64_t i = 0; i < count; i += WIDE) {
        uwide bits = noise_bits(*(const uwide *)(token_ids + i), first, second);
        put(bounds + i, 0, noise_bound(bits));
        for (int lane = 0; lane < WIDE; lane++) exact[i + lane] = gumbel(bits[lane]);
    }
}
