/*
 * Kernels under test as a shared library.
 *
 *     cc -O2 -shared -fPIC -Idevice/include device/examples/c/plugin.c -o libmine.so -lm
 *     karat verify llama --subject lib:./libmine.so
 *
 * Built with one of these it is wrong on purpose, to see how that is reported:
 *   -DTRANSPOSED  square projections are read by columns
 *   -DWILD        the norm writes one value behind its output
 *   -DMEDDLES     the norm writes into its input
 *   -DCRASHES     the projection reads through a null pointer
 *   -DHANGS       the projection never returns
 *   -DOLD_ABI     the table says another version
 */
#include "karat.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>

static int32_t linear(const float *x, const float *w, const float *b, float *y, uint64_t tokens, uint64_t in,
                      uint64_t out) {
#ifdef CRASHES
    fprintf(stderr, "about to read weights of %d layers\n", 32);
    volatile const float *nowhere = NULL;
    y[0] = *nowhere;
#endif
#ifdef HANGS
    for (volatile int forever = 1; forever;) {
    }
#endif
    for (uint64_t t = 0; t < tokens; t++) {
        for (uint64_t o = 0; o < out; o++) {
            float sum = 0.0f;
            for (uint64_t i = 0; i < in; i++) {
                uint64_t at = o * in + i;
#ifdef TRANSPOSED
                if (in == out) at = i * out + o;
#endif
                sum += x[t * in + i] * w[at];
            }
            y[t * out + o] = b ? sum + b[o] : sum;
        }
    }
    return KARAT_OK;
}

static int32_t rms_norm(const float *x, const float *weight, float *y, uint64_t rows, uint64_t width, float eps) {
    for (uint64_t r = 0; r < rows; r++) {
        float squares = 0.0f;
        for (uint64_t i = 0; i < width; i++) squares += x[r * width + i] * x[r * width + i];
        float scale = 1.0f / sqrtf(squares / (float)width + eps);
        for (uint64_t i = 0; i < width; i++) {
            float scaled = x[r * width + i] * scale;
            y[r * width + i] = weight ? scaled * weight[i] : scaled;
        }
    }
#ifdef WILD
    y[rows * width] = 0.0f;
#endif
#ifdef MEDDLES
    ((float *)x)[1] += 1.0f;
#endif
    return KARAT_OK;
}

static int32_t attention(const float *q, const float *k, const float *v, const float *sinks, float *y,
                         const karat_attention *a) {
    if (sinks || a->softcap != 0.0) return KARAT_NOT_SUPPORTED;
    uint64_t group = a->heads / a->kv_heads;
    for (uint64_t t = 0; t < a->tokens; t++) {
        uint64_t position = a->first + t;
        uint64_t from = a->window && position + 1 > a->window ? position + 1 - a->window : 0;
        for (uint64_t h = 0; h < a->heads; h++) {
            const float *query = q + (t * a->heads + h) * a->head_dim;
            float *context = y + (t * a->heads + h) * a->value_dim;
            float largest = -INFINITY, total = 0.0f;
            for (uint64_t d = 0; d < a->value_dim; d++) context[d] = 0.0f;
            /* Two passes over the keys: the largest score, then weights and values. */
            for (int pass = 0; pass < 2; pass++) {
                for (uint64_t j = from; j <= position && j < a->keys; j++) {
                    const float *key = k + (j * a->kv_heads + h / group) * a->head_dim;
                    float score = 0.0f;
                    for (uint64_t d = 0; d < a->head_dim; d++) score += query[d] * key[d];
                    score *= (float)a->scale;
                    if (pass == 0) {
                        if (score > largest) largest = score;
                        continue;
                    }
                    float weight = expf(score - largest);
                    const float *value = v + (j * a->kv_heads + h / group) * a->value_dim;
                    total += weight;
                    for (uint64_t d = 0; d < a->value_dim; d++) context[d] += weight * value[d];
                }
            }
            for (uint64_t d = 0; d < a->value_dim; d++) context[d] /= total;
        }
    }
    return KARAT_OK;
}

static int32_t residual(const float *x, const float *branch, float *y, uint64_t n, float multiplier) {
    for (uint64_t i = 0; i < n; i++) y[i] = x[i] + multiplier * branch[i];
    return KARAT_OK;
}

static const karat_plugin table = {
#ifdef OLD_ABI
    .abi = KARAT_ABI + 7,
#else
    .abi = KARAT_ABI,
#endif
    .size = sizeof(karat_plugin),
    .name = "the C example",
    .contract = "f32",
    .linear = linear,
    .rms_norm = rms_norm,
    .attention = attention,
    .residual = residual,
};

const karat_plugin *karat_plugin_get(uint32_t abi) {
    (void)abi;
    return &table;
}
