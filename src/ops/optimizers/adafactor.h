#pragma once
#include "../../base/base.h"
#include "../../backend/launch.h"
#include "../scratch.h"

/* -------------------------------------------------------------------------- scratch of Adafactor on a CPU */

enum { TT__ADAFACTOR_PARTS = 32 }; /* max number of parts of the rows whose squares are summed apart */

typedef struct tt__adafactor_numbers {
    float weight;           /* weight of this step in the running means */
    float mean;             /* mean of out[1] */
    float step;             /* factor on the update whose elements are not clipped yet */
} tt__adafactor_numbers;

/* The scratch memory of ADAFACTOR on a CPU, in bytes from its start: a tt__adafactor_numbers; for each part
   of the rows a row of column sums; a row of factors of the columns; two sums of squares for each chunk. */
typedef struct tt__adafactor_space {
    int64_t part;           /* rows of a part */
    size_t sums, factors, squares, end;
} tt__adafactor_space;

static tt__adafactor_space tt__adafactor_space_of(int64_t rows, int64_t cols)
{
    const int64_t part = tt__ceil_div(rows, TT__ADAFACTOR_PARTS);
    const size_t sums = tt__align_up(sizeof(tt__adafactor_numbers));
    const size_t factors = sums + (size_t)tt__ceil_div(rows, part) * tt__row_bytes(cols);
    const size_t squares = factors + tt__row_bytes(cols);
    const size_t chunks = (size_t)tt__ceil_div(rows * cols, TT__CHUNK);
    const tt__adafactor_space s = {part, sums, factors, squares, squares + tt__align_up(chunks * 16)};
    return s;
}
