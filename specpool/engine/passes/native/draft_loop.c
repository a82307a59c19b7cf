/* Runs all steps of drafts without returning to Python. Each step chooses a token for every draft, then runs a pass over
   the drafts that continue. The pass (decoder.c) and the sampler (sampler.c) are other libraries. Both run on the
   threads of the pass.

   Drafts end as in `drafts.py`, by the same operations on doubles. Compile without fused multiply-adds. draft_loop.py
   mirrors the structs. */

#include "sampling.h"
#include "segment.h"

#include <math.h>
#include <string.h>

typedef struct {
    Row row;          /* of the next token */
    int64_t position; /* of the next token */
    int64_t slot, prefix_length, offset;
    uint64_t seed;
    int64_t prompt_length, unmasked_from; /* first position at which stop tokens are allowed */
    int32_t *counted_ids, *counts;        /* of the row, with room for all draft tokens */
    double min_chance, next_chance, chance;
    int64_t round, num_draft_tokens, count; /* `count`: draft tokens so far */
    int64_t is_broken;                      /* whether logits were not finite, which ends the draft */
    Segment segment;                        /* of the next pass, if the model has recurrent layers */
} Draft;

typedef struct {
    const double *chances; /* acceptance probabilities by confidence, in equal bins; if none, the confidence */
    int64_t num_chances;
    double step_cost, gain; /* `gain`: expected gain of another step */
} Round;

typedef struct {
    void (*forward)(const void *model, void *batch, int64_t rows);
    const void *model;
    void *batch;                                                         /* a pass of up to `num_drafts` rows */
    int64_t *token_ids, *positions, *slots, *prefix_lengths, *offsets; /* of the pass, [num_drafts] */
    Segment *segments; /* of the pass, [num_drafts]; null: no recurrent layers */
    const float *logits, *first_logits; /* of the pass and of the pass before the loop, [num_drafts] rows */
    int64_t stride, first_stride;       /* floats of a row */
    float *input_states;     /* of the pass, [num_drafts, hidden] */
    const float *own_states; /* of the pass, [num_drafts, hidden] */
    float *states;           /* result, [num_drafts, max_draft_tokens, hidden]: of every pass, the first before the loop */
    int64_t hidden;          /* 0: the model reads no states */
    void (*sample)(const Batch *batch);
    Batch sampling; /* with [num_drafts] rows */
    Draft *drafts;
    Round *rounds;
    int64_t num_drafts, num_rounds, max_draft_tokens;
    int32_t *draft_token_ids;  /* result, [num_drafts, max_draft_tokens] */
    double *confidences;       /* result, like the token ids */
    void (*read_token)(int64_t draft, int64_t token); /* updates the mask of a constrained draft */
    int64_t num_passes, num_tokens; /* result: passes and rows run */
} Loop;

/* As in `noise.py`. */
static void set_noise_keys(Row *row, uint64_t seed, uint64_t position) {
    uint64_t x = seed * 0x9E3779B97F4A7C15u + position * 0xD1B54A32D192ED03u + 0x632BE59BD9B4E019u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    row->first_key = (int32_t)(uint32_t)x;
    row->second_key = (int32_t)(x >> 32);
}

/* Chooses the next token of each draft. */
static void sample_drafts(Loop *loop, Draft **drafts, int64_t count, const float *logits, int64_t stride) {
    for (int64_t i = 0; i < count; i++) {
        Row *row = &drafts[i]->row;
        row->logits = logits + i * stride;
        set_noise_keys(row, drafts[i]->seed, drafts[i]->position);
        if (drafts[i]->position >= drafts[i]->unmasked_from) row->num_masked = 0;
        loop->sampling.rows[i] = *row;
    }
    loop->sampling.num_rows = count;
    loop->sample(&loop->sampling);
}

/* Counts a draft token for the penalties of later rows. */
static void count_token(Draft *draft, int32_t token) {
    int64_t place = 0;
    while (place < draft->row.num_counted && draft->counted_ids[place] != token) place++;
    if (place == draft->row.num_counted) {
        draft->counted_ids[place] = token;
        draft->counts[place] = 0;
        draft->row.num_counted++;
    }
    int32_t before = draft->counts[place];
    draft->counts[place] = (before > 0 ? before : 0) + (draft->position >= draft->prompt_length);
}

static double acceptance_chance(const Round *round, double confidence) {
    if (!round->num_chances) return confidence;
    int64_t bin = (int64_t)(confidence * (double)round->num_chances);
    return round->chances[bin < round->num_chances ? bin : round->num_chances - 1];
}

/* Appends the chosen token. */
static void append(const Loop *loop, Draft *draft, const Row *chosen) {
    int64_t place = (draft - loop->drafts) * loop->max_draft_tokens + draft->count;
    if (!chosen->is_finite) {
        draft->is_broken = 1;
        return;
    }
    loop->draft_token_ids[place] = chosen->token;
    if (chosen->num_top >= 0) {
        loop->confidences[place] = exp((double)chosen->logprob);
        draft->chance *= acceptance_chance(loop->rounds + draft->round, loop->confidences[place]);
    }
    if (draft->counted_ids) count_token(draft, chosen->token);
    if (draft->row.allowed) loop->read_token(draft - loop->drafts, chosen->token);
    draft->count++;
}

static double gain_of(const Draft *draft) {
    return draft->min_chance ? draft->chance * draft->next_chance - draft->min_chance : (double)INFINITY;
}

static int wants_more(const Draft *draft) {
    return !draft->is_broken && draft->count < draft->num_draft_tokens && gain_of(draft) >= 0;
}

/* Keeps the drafts to extend by another step, and returns their number. Drops all drafts of a round if the step would
   gain it less than its cost. */
static int64_t keep_unfinished(const Loop *loop, Draft **drafts, int64_t count) {
    int64_t kept = 0;
    for (Round *round = loop->rounds; round < loop->rounds + loop->num_rounds; round++) round->gain = 0;
    for (int64_t i = 0; i < count; i++)
        if (wants_more(drafts[i])) loop->rounds[drafts[i]->round].gain += gain_of(drafts[i]);
    for (int64_t i = 0; i < count; i++) {
        const Round *round = loop->rounds + drafts[i]->round;
        if (wants_more(drafts[i]) && round->gain >= round->step_cost) drafts[kept++] = drafts[i];
    }
    return kept;
}

/* The state after the pass that follows `count` draft tokens. */
static float *state_of(const Loop *loop, const Draft *draft, int64_t count) {
    return loop->states + ((draft - loop->drafts) * loop->max_draft_tokens + count) * loop->hidden;
}

/* The recurrence of a draft's next row. A checkpoint is written before the first one, if at all. */
static Segment next_segment(Draft *draft, int64_t row) {
    Segment own = draft->segment, *next = &draft->segment;
    own.first_row = row, own.rows = 1, own.start = draft->position;
    if (own.write >= 0)
        next->read = own.write, next->read_position = own.write_position, next->read_tail = own.write_tail, next->write = -1;
    return own;
}

/* Runs the last token of each draft. */
static void run_pass(Loop *loop, Draft **drafts, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        Draft *draft = drafts[i];
        loop->token_ids[i] = loop->draft_token_ids[(draft - loop->drafts) * loop->max_draft_tokens + draft->count - 1];
        if (loop->segments) loop->segments[i] = next_segment(draft, i);
        loop->positions[i] = draft->position++;
        loop->slots[i] = draft->slot;
        loop->prefix_lengths[i] = draft->prefix_length;
        loop->offsets[i] = draft->offset;
    }
    int64_t hidden = loop->hidden;
    size_t size = hidden * sizeof(float);
    for (int64_t i = 0; hidden && i < count; i++)
        memcpy(loop->input_states + i * hidden, state_of(loop, drafts[i], drafts[i]->count - 1), size);
    loop->forward(loop->model, loop->batch, count);
    for (int64_t i = 0; hidden && i < count; i++)
        memcpy(state_of(loop, drafts[i], drafts[i]->count), loop->own_states + i * hidden, size);
    loop->num_passes++;
    loop->num_tokens += count;
}

/* Extends the drafts until each round has enough. */
void run_loop(Loop *loop) {
    int64_t count = loop->num_drafts;
    Draft *drafts[count];
    for (int64_t i = 0; i < count; i++) drafts[i] = loop->drafts + i;
    const float *logits = loop->first_logits;
    for (int64_t stride = loop->first_stride; count; logits = loop->logits, stride = loop->stride) {
        sample_drafts(loop, drafts, count, logits, stride);
        for (int64_t i = 0; i < count; i++) append(loop, drafts[i], loop->sampling.rows + i);
        count = keep_unfinished(loop, drafts, count);
        if (count) run_pass(loop, drafts, count);
    }
}
