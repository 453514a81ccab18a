/* Judges one op as Karat did.
 *
 *     cc check.c -o check -lm && ./check          judges what the subject gave
 *     ./check y.f32                               judges a result of yours: raw f32, row after row
 *     cc -DKERNEL='"mine.c"' check.c -o check -lm && ./check
 *                                                 judges void kernel(float *y), which reads input("x", ...)
 *
 * The exit code is 0 where the result is within its limits, 1 where it is not, 2 where there is none. To be run
 * in the directory of the case, on a little-endian machine.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct input { const char *name; int axes; long shape[8]; long count, offset; };
struct number { const char *name; double value; };

@CASE@
#define COUNT ((long)ROWS * COLUMNS)
#define TILE_ROWS 16
#define TILE_COLUMNS 32

static char *slurp(const char *path, long *size)
{
    FILE *file = fopen(path, "rb");
    char *data;
    if (!file) return 0;
    fseek(file, 0, SEEK_END);
    *size = ftell(file);
    rewind(file);
    data = malloc(*size + 1);
    if (data && fread(data, 1, *size, file) != (size_t)*size) { free(data); data = 0; }
    fclose(file);
    return data;
}

/* The data of a safetensors file: behind eight bytes of length and a header of that length. */
static const char *arrays(const char *path)
{
    long size;
    unsigned char *data = (unsigned char *)slurp(path, &size);
    unsigned long long header = 0;
    int i;
    if (!data || size < 8) return 0;
    for (i = 7; i >= 0; i--) header = header << 8 | data[i];
    return header <= (unsigned long long)size - 8 ? (const char *)data + 8 + header : 0;
}

/* An input of the op, or NULL where it has none of this name; `shape` may be NULL. */
const float *input(const char *name, const long **shape)
{
    static const char *data;
    const struct input *i;
    if (!data) data = arrays("inputs.safetensors");
    for (i = INPUTS; data && i->name; i++)
        if (!strcmp(i->name, name)) {
            if (shape) *shape = i->shape;
            return (const float *)(data + i->offset);
        }
    return 0;
}

/* A number of the op; 0 where it has none of this name. */
double number(const char *name)
{
    const struct number *n;
    for (n = NUMBERS; n->name; n++)
        if (!strcmp(n->name, name)) return n->value;
    return 0.0;
}

#ifdef KERNEL
#include KERNEL
#endif

static double score(float y, double r, double variance)
{
    if (y == r || (variance == 0.0 && y == (float)r) || (isnan(y) && isnan(r))) return 0.0;
    if (variance == 0.0 || !isfinite(y) || !isfinite(r)) return INFINITY;
    return (y - r) / sqrt(variance);
}

struct group { double n, z, z2; };

static int spreads(const char *what, long index, struct group g)
{
    double k = 2.0 / (9.0 * g.n), widest;
    if (g.n == 0) return 0;
    widest = 1.0 - k + Z_GROUP * sqrt(k);
    if (sqrt(g.z2 / g.n) > 1.1 * pow(widest < 1.0 ? 1.0 : widest, 1.5) ||
        (CALIBRATED && fabs(g.z / g.n) > 0.05 + Z_GROUP / sqrt(g.n))) {
        printf("FAILED: " OP " at " TAP ", %s %ld: rms z %.3f, mean z %.3f\n", what, index, sqrt(g.z2 / g.n),
               g.z / g.n);
        return 1;
    }
    return 0;
}

static void add(struct group *g, double z) { g->n++; g->z += z; g->z2 += z * z; }

int main(int argc, char **argv)
{
    const char *data = arrays("expected.safetensors");
    const double *r = (const double *)data, *v = r + COUNT, *bound = v + COUNT;
    const float *y = (const float *)(bound + COUNT);
    long n, wrong = 0, first = 0, size, across = (COLUMNS + TILE_COLUMNS - 1) / TILE_COLUMNS;
    long tiles = (ROWS + TILE_ROWS - 1) / TILE_ROWS * across;
    struct group all = {0}, *rows, *columns, *of_tiles;
    if (!data) { printf("expected.safetensors is not here\n"); return 2; }
    if (argc > 1) {
        y = (const float *)slurp(argv[1], &size);
        if (!y || size != 4 * COUNT) { printf("%s does not hold %ld values\n", argv[1], COUNT); return 2; }
    }
#ifdef KERNEL
    else {
        float *made = malloc(sizeof(float) * COUNT);
        for (n = 0; made && n < COUNT; n++) made[n] = NAN;
        if (made) kernel(made);
        y = made;
    }
#endif
    rows = calloc(ROWS, sizeof *rows);
    columns = calloc(COLUMNS, sizeof *columns);
    of_tiles = calloc(tiles, sizeof *of_tiles);
    if (!y || !rows || !columns || !of_tiles) { printf("out of memory\n"); return 2; }
    for (n = 0; n < COUNT; n++) {
        long row = n / COLUMNS, col = n % COLUMNS;
        double z = score(y[n], r[n], v[n]), off = z == 0.0 ? 0.0 : fabs(y[n] - r[n]);
        if (!(fabs(z) <= Z_MAX && off <= bound[n] * 1.000001) && !wrong++) first = n;
        if (v[n] > 0.0 || z != 0.0) {
            add(&all, z);
            add(&rows[row], z);
            add(&columns[col], z);
            add(&of_tiles[row / TILE_ROWS * across + col / TILE_COLUMNS], z);
        }
    }
    if (wrong) {
        printf("FAILED: " OP " at " TAP ", %ld of %ld, first [%ld, %ld]: expected %.9g, found %.9g\n", wrong,
               COUNT, first / COLUMNS, first % COLUMNS, r[first], y[first]);
        return 1;
    }
    if (spreads("whole", 0, all)) return 1;
    for (n = 0; n < ROWS; n++) if (spreads("row", n, rows[n])) return 1;
    for (n = 0; n < COLUMNS; n++) if (spreads("column", n, columns[n])) return 1;
    for (n = 0; n < tiles; n++) if (spreads("tile", n, of_tiles[n])) return 1;
    printf("PASSED: " OP " at " TAP ", %ld values\n", COUNT);
    return 0;
}
