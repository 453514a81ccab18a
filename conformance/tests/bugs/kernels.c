/*
 * Kernels with mistakes, written like any kernel and without a look at how Karat makes the same mistakes.
 * Built with -DBUG=n; without, they are right.
 *
 *   1  attention: heads share keys round robin        5  norm: the sum of squares for their mean
 *   2  attention: a query also sees the next token    6  residual: the stream is added twice
 *   3  attention: the mask forgets the cache          7  product: only the last tile of K is kept
 *   4  attention: the scale is left out               8  product: rows behind the first launch are zero
 */
#include "karat.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifndef BUG
#define BUG 0
#endif

static int32_t product(const float *x, const float *w, const float *b, float *y, uint64_t tokens, uint64_t in,
                       uint64_t out) {
    memset(y, 0, sizeof(float) * tokens * out);
    for (uint64_t t = 0; t < tokens; t++) {
        if (BUG == 8 && t >= 16) break;
        for (uint64_t k = 0; k < in; k += 16) { /* K in tiles */
            for (uint64_t o = 0; o < out; o++) {
                float tile = 0.0f;
                for (uint64_t i = k; i < in && i < k + 16; i++) tile += x[t * in + i] * w[o * in + i];
                if (BUG == 7)
                    y[t * out + o] = tile;
                else
                    y[t * out + o] += tile;
            }
        }
        for (uint64_t o = 0; b && o < out; o++) y[t * out + o] += b[o];
    }
    return KARAT_OK;
}

static int32_t norm(const float *x, const float *weight, float *y, uint64_t rows, uint64_t width, float eps) {
    for (uint64_t r = 0; r < rows; r++, x += width, y += width) {
        float squares = 0.0f;
        for (uint64_t i = 0; i < width; i++) squares += x[i] * x[i];
        float mean = BUG == 5 ? squares : squares / (float)width;
        for (uint64_t i = 0; i < width; i++) y[i] = x[i] / sqrtf(mean + eps) * (weight ? weight[i] : 1.0f);
    }
    return KARAT_OK;
}

static int32_t attend(const float *q, const float *k, const float *v, const float *sinks, float *y,
                      const karat_attention *a) {
    if (sinks || a->softcap != 0.0 || a->window) return KARAT_NOT_SUPPORTED;
    float *weights = malloc(sizeof(float) * (a->keys + 1));
    if (!weights) return KARAT_FAILED;
    for (uint64_t t = 0; t < a->tokens; t++) {
        uint64_t last = (BUG == 3 ? 0 : a->first) + t + (BUG == 2 ? 1 : 0);
        if (last >= a->keys) last = a->keys - 1;
        for (uint64_t h = 0; h < a->heads; h++) {
            uint64_t shared = BUG == 1 ? h % a->kv_heads : h * a->kv_heads / a->heads;
            float top = -INFINITY, total = 0.0f;
            for (uint64_t j = 0; j <= last; j++) {
                float dot = 0.0f;
                for (uint64_t d = 0; d < a->head_dim; d++)
                    dot += q[(t * a->heads + h) * a->head_dim + d] * k[(j * a->kv_heads + shared) * a->head_dim + d];
                weights[j] = BUG == 4 ? dot : dot * (float)a->scale;
                if (weights[j] > top) top = weights[j];
            }
            for (uint64_t j = 0; j <= last; j++) total += weights[j] = expf(weights[j] - top);
            for (uint64_t d = 0; d < a->value_dim; d++) {
                float sum = 0.0f;
                for (uint64_t j = 0; j <= last; j++)
                    sum += weights[j] / total * v[(j * a->kv_heads + shared) * a->value_dim + d];
                y[(t * a->heads + h) * a->value_dim + d] = sum;
            }
        }
    }
    free(weights);
    return KARAT_OK;
}

static int32_t add(const float *x, const float *branch, float *y, uint64_t n, float multiplier) {
    for (uint64_t i = 0; i < n; i++) y[i] = (BUG == 6 ? 2.0f : 1.0f) * x[i] + multiplier * branch[i];
    return KARAT_OK;
}

static const karat_plugin table = {
    .abi = KARAT_ABI,
    .size = sizeof(karat_plugin),
    .name = "kernels with mistakes",
    .contract = "f32",
    .linear = product,
    .rms_norm = norm,
    .attention = attend,
    .residual = add,
};

const karat_plugin *karat_plugin_get(uint32_t abi) {
    (void)abi;
    return &table;
}
