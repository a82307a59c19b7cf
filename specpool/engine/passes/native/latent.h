/* Latent attention: see fused_latent.py. The cache holds one head of keys [columns, HEAD_DIM], and the first RANK features
   of a key are its value. Each query head has two GEMMs of its own, whose rows follow each other: one absorbs the weights
   of keys into queries, one expands attended latent vectors into values.

   All query heads attend to the same keys. They are divided into blocks of GROUPS heads, so a thread keeps the sums of a
   block in registers, and the blocks of a row share the keys in the cache of a core. */

#include "experts.h"

/* Activations of a layer. */
typedef struct {
    const Model *model;
    const Batch *batch;
    const float *inputs; /* [rows, padded outputs of `inputs`] */
    float *query_latent; /* normalized, [rows, inputs of `query_up`] */
    float *projected;    /* queries as projected, [rows, padded outputs of `query_up`] */
    float *plain;        /* the parts of queries that do not rotate, [heads, rows, key_dim] */
    float *queries;      /* of latent keys, [rows, heads, HEAD_DIM] */
    float *attended;     /* mean latent vectors, [heads, rows, RANK] */
    float *scores;       /* of the threads, as in `attend_tasks` */
} Latent;

/* Lays out the activations. Returns the end of the workspace, which may be null to measure it. */
static float *lay_out_latent(Latent *latent, const Model *model, const Batch *batch, int64_t rows, const float *inputs,
                             float *workspace) {
    const Layer *layer = model->layers;
    int64_t heads = HEADS(model);
    *latent = (Latent){model, batch, inputs};
    if (!RANK) return workspace;
    latent->query_latent = take(&workspace, rows * layer->query_up.inputs);
    latent->projected = take(&workspace, rows * layer->query_up.outputs);
    latent->plain = take(&workspace, rows * heads * model->latent.key_dim);
    latent->queries = take(&workspace, rows * heads * HEAD_DIM);
    latent->attended = take(&workspace, rows * heads * RANK);
    return workspace;
}

/* Rotates a query or key in place. */
static void rotate_for(const Latent *latent, const Layer *layer, int64_t row, float *head) {
    int64_t size = latent->model->latent.rotary_dim, first = latent->batch->positions[row] * size;
    const Rotary *rotary = latent->model->rotaries + layer->rotary;
    rotate(rotary->cosines + first, rotary->sines + first, size, head);
}

/* Places the queries of a row for the GEMMs of heads, and rotates. `from`: the plain parts of all heads, then the
   rotating ones. */
static void place_queries(const Latent *latent, const Layer *layer, int64_t row, const float *from) {
    const LatentSizes *sizes = &latent->model->latent;
    int64_t heads = HEADS(latent->model), rows = latent->batch->rows;
    const float *rotating = from + heads * sizes->key_dim;
    for (int64_t h = 0; h < heads; h++) {
        float *to = latent->queries + (row * heads + h) * HEAD_DIM + RANK;
        memcpy(latent->plain + (h * rows + row) * sizes->key_dim, from + h * sizes->key_dim, sizes->key_dim * sizeof(float));
        memcpy(to, rotating + h * sizes->rotary_dim, sizes->rotary_dim * sizeof(float));
        rotate_for(latent, layer, row, to);
    }
}

/* Caches the key of each row, and normalizes the latent vector of its queries, or places them. */
static ONE_COPY void cache_latent(const Stage *stage, int64_t row, int64_t end) {
    const Latent *latent = stage->pass;
    const Layer *layer = stage->item;
    const LatentSizes *sizes = &latent->model->latent;
    int64_t query_size = layer->query_up.inputs; /* of the queries or their latent vector */
    if (!query_size) query_size = HEADS(latent->model) * (sizes->key_dim + sizes->rotary_dim);
    for (; row < end; row++) {
        const float *inputs = latent->inputs + row * layer->inputs.outputs;
        const Places places = places_of(latent->model, layer, latent->batch, row);
        float *key = layer->keys + column_of(&places, latent->batch->positions[row]) * HEAD_DIM;
        rms_norm(inputs + query_size, layer->latent_norm, RANK, sizes->eps, key);
        memcpy(key + RANK, inputs + query_size + RANK, sizes->rotary_dim * sizeof(float));
        rotate_for(latent, layer, row, key + RANK);
        if (layer->query_up.panels)
            rms_norm(inputs, layer->query_norm, query_size, sizes->eps, latent->query_latent + row * query_size);
        else place_queries(latent, layer, row, inputs);
    }
}

static void place_projected(const Stage *stage, int64_t row, int64_t end) {
    const Latent *latent = stage->pass;
    const Layer *layer = stage->item;
    for (; row < end; row++) place_queries(latent, layer, row, latent->projected + row * layer->query_up.outputs);
}

/* GEMMs of heads. Units: panels of each head in turn. `all`: the weights of all heads. Inputs: [heads, rows, inputs];
   outputs: [rows, heads, stride]. */
static INLINE void gemms_of_heads(const Stage *stage, int64_t unit, int64_t end, const Linear *all, int64_t stride) {
    const Latent *latent = stage->pass;
    int64_t heads = HEADS(latent->model), rows = latent->batch->rows, panels = all->outputs / heads / PANEL;
    while (unit < end) {
        int64_t head = unit / panels, first = unit % panels;
        int64_t last = end - unit < panels - first ? first + end - unit : panels;
        const Linear own = {all->panels + head * panels, 0, all->inputs, heads * stride, all->widened_from};
        gemm_panels(&own, first, last, rows, stage->x + head * rows * all->inputs, 0, stage->out + head * stride);
        unit += last - first;
    }
}

static void absorb(const Stage *stage, int64_t unit, int64_t end) {
    gemms_of_heads(stage, unit, end, &((const Layer *)stage->item)->key_ups, HEAD_DIM);
}

static void expand(const Stage *stage, int64_t unit, int64_t end) {
    const Linear *value_ups = &((const Layer *)stage->item)->value_ups;
    gemms_of_heads(stage, unit, end, value_ups, value_ups->outputs / HEADS(((const Latent *)stage->pass)->model));
}

/* Units: the blocks of heads of each row in turn. */
static ONE_COPY void attend_latent(const Stage *stage, int64_t task, int64_t end) {
    const Latent *latent = stage->pass;
    const Model *model = latent->model;
    const Batch *batch = latent->batch;
    const Layer *layer = stage->item;
    float *scores = latent->scores + thread_number * (GROUPS * batch->scores + batch->scores / LANES);
    int32_t *blocks = (int32_t *)(scores + GROUPS * batch->scores);
    for (; task < end; task++) {
        int64_t row = task / model->kv_heads, head = task % model->kv_heads * GROUPS;
        const Places places = places_of(model, layer, batch, row);
        int64_t number = find_blocks(&places, blocks);
        attend(latent->queries + (row * HEADS(model) + head) * HEAD_DIM, layer->keys, layer->keys, &places, blocks, number,
               model->scaling, 0, 0, scores, batch->scores, layer->keys + column_of(&places, 0) * HEAD_DIM,
               latent->attended + (head * batch->rows + row) * RANK, batch->rows * RANK);
    }
}
