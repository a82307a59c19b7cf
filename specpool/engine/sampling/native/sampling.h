/* The arguments of `sample_batch`, which chooses a token for each row of logits. compiled.py mirrors the structs. */

#include <stdint.h>

struct Pool; /* pool.h */

enum { SAMPLED, GREEDY };

typedef struct {
    const float *logits; /* [outputs] */
    const int32_t *bias_ids, *masked_ids;
    const uint32_t *allowed; /* a bit for each token; null: all are allowed */
    const int32_t *counted_ids;
    const float *biases;   /* [num_biases] */
    const int32_t *counts; /* [num_counted]: occurrences in the output; 0: only in the prompt, -1: nowhere */
    int64_t num_biases, num_masked, num_counted;
    int32_t *top_ids; /* [num_top] */
    float *top_logprobs;
    int64_t num_top; /* -1: no log-probabilities */
    float temperature, log_min_p, top_p, repetition, frequency, presence;
    int32_t top_k, first_key, second_key, kind;
    int32_t sequence, position; /* the row is number `position` of its sequence */
    int32_t expected;           /* the draft token that the next row follows; -1: none */
    /* Results. `token` is -1 if an earlier row of the sequence rejected its draft token. */
    int32_t token, is_finite;
    float logprob;
} Row;

typedef struct {
    Row *rows;
    int64_t num_rows, outputs, vocabulary, threads;
    const int32_t *token_ids;  /* of each output, padded to whole blocks */
    const uint8_t *runs;       /* for each block: whether its tokens are consecutive, starting at a multiple of 32 */
    const int32_t *outputs_of; /* of each token; -1: none */
    int32_t *rejected;         /* for each sequence: its first row that rejected a draft token; INT32_MAX: none */
    float *workspace;          /* [threads, workspace_floats] */
    const struct Pool *pool;   /* runs the rows; null: the sampler's own */
} Batch;

void sample_batch(const Batch *batch);
