/*
 * Karat's interface for libraries under test.
 *
 * A library exports one function, karat_plugin_get, that returns a table. Any entry of the table may be
 * NULL: Karat then computes that op itself and lists it as not exposed. All tensors are f32, row after row,
 * and none of them overlap. Functions return KARAT_OK, KARAT_NOT_SUPPORTED for arguments that they do not
 * handle, or KARAT_FAILED. They run one at a time, in a process of their own.
 *
 * Output buffers start as NaN and lie between guard values; a write outside is reported.
 */
#ifndef KARAT_H
#define KARAT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when an existing field changes its place or its meaning. New fields are added at the end. */
#define KARAT_ABI 1

#define KARAT_OK 0
#define KARAT_NOT_SUPPORTED 1
#define KARAT_FAILED 2

#define KARAT_SILU 0
#define KARAT_GELU_TANH 1

/* Row t of the queries stands at position first + t and sees keys j <= first + t; with a window w > 0 only
 * those with j + w > first + t. Query head h reads key head h / (heads / kv_heads). */
typedef struct karat_attention {
    uint64_t tokens;
    uint64_t keys;
    uint64_t heads;
    uint64_t kv_heads;
    uint64_t head_dim;
    uint64_t value_dim;
    uint64_t first;
    uint64_t window;  /* 0: none */
    double scale;
    double softcap;   /* 0: none; else scores become softcap * tanh(score / softcap) */
} karat_attention;

/* Shows a value of a model. `site` is a name such as "layers.0.q_proj"; shape has `rank` lengths. */
typedef void (*karat_tap)(void *context, const char *site, const float *values, const uint64_t *shape,
                          uint32_t rank);

typedef struct karat_plugin {
    uint32_t abi;   /* KARAT_ABI */
    uint32_t size;  /* sizeof(karat_plugin) */
    const char *name;
    /* The number formats of the library: the name of a built-in contract ("f32", "int8", ...) or a contract
     * as JSON. NULL: f32. */
    const char *contract;

    /* y[t, o] = sum_i x[t, i] * w[o, i] + b[o]; b may be NULL. x [tokens, in], w [out, in], y [tokens, out] */
    int32_t (*linear)(const float *x, const float *w, const float *b, float *y, uint64_t tokens, uint64_t in,
                      uint64_t out);
    /* y = x / sqrt(mean(x^2) + eps) * weight over rows of `width`; weight may be NULL. x, y [rows, width] */
    int32_t (*rms_norm)(const float *x, const float *weight, float *y, uint64_t rows, uint64_t width, float eps);
    /* Half-split: y[i] = x[i] cos[i] - x[i + R/2] sin[i], y[i + R/2] = x[i + R/2] cos[i] + x[i] sin[i];
     * interleaved: the pairs are x[2i], x[2i + 1], written half-split. The rest of a head is copied.
     * x, y [tokens, heads, head_dim], cos, sin [tokens, rotary] */
    int32_t (*rope)(const float *x, const float *cos, const float *sin, float *y, uint64_t tokens,
                    uint64_t heads, uint64_t head_dim, uint64_t rotary, int32_t interleaved);
    /* softmax(scale * q k^T) v. q [tokens, heads, head_dim], k [keys, kv_heads, head_dim],
     * v [keys, kv_heads, value_dim], sinks [heads] or NULL, y [tokens, heads * value_dim] */
    int32_t (*attention)(const float *q, const float *k, const float *v, const float *sinks, float *y,
                         const karat_attention *shape);
    /* y = act(gate) * up; n values. activation: KARAT_SILU, KARAT_GELU_TANH */
    int32_t (*gated_act)(const float *gate, const float *up, float *y, uint64_t n, int32_t activation);
    /* y = x + multiplier * branch; n values */
    int32_t (*residual)(const float *x, const float *branch, float *y, uint64_t n, float multiplier);
    /* y[t] = table[ids[t]] * scale. table [vocab, hidden], y [tokens, hidden] */
    int32_t (*embed)(const uint32_t *ids, const float *table, float *y, uint64_t tokens, uint64_t vocab,
                     uint64_t hidden, float scale);

    /* A whole model: all of load, reset and step_batch, or none. `package` is a directory or a file. */
    void *(*load)(const char *package);
    void (*unload)(void *model);
    /* Forgets all tokens. */
    int32_t (*reset)(void *model);
    /* Feeds tokens behind those before; writes logits [tokens, vocab]; shows any values through `tap`. */
    int32_t (*step_batch)(void *model, const uint32_t *ids, uint64_t tokens, float *logits, uint64_t vocab,
                          karat_tap tap, void *context);

    /* The state that a model carries from pass to pass: both, or none. state_get shows all of it through `tap`
     * under the names of the sites ("layers.0.k_cache" [keys, kv_heads, head_dim], "layers.0.gdn_state", ...;
     * further names for anything else that it needs). state_set puts one tensor in, in the shape in which
     * it was shown. Karat judges the state like any value, and before every pass calls reset and puts back all
     * that was shown: what is not shown is lost, and seen to be missing. */
    int32_t (*state_get)(void *model, karat_tap tap, void *context);
    int32_t (*state_set)(void *model, const char *site, const float *values, const uint64_t *shape,
                         uint32_t rank);
} karat_plugin;

/* `abi` is the KARAT_ABI of the caller. */
const karat_plugin *karat_plugin_get(uint32_t abi);

#ifdef __cplusplus
}
#endif

#endif
