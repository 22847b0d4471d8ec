// A packed weight, as the products read it: in panels of 16 rows. With n counting the rows of a panel:
//   kDense  bf16 [panel][k / 2][n][2]
//   kInt8   int8 [panel][k / 4][n][4], one scale per row of W; `sums` holds each row's sum of codes
//   kInt4   nibbles [panel][k / 32][i < 4][n][4]: low ones are k = 4 i + j, high ones 4 (i + 4) + j of the group;
//           fp16 scale and minimum [panel][k / 32][n]: w = scale * code + minimum, GGUF's Q4_1 as it is
#pragma once

#include "activations.h"

namespace sglite {

enum Format : int32_t { kDense = 0, kInt8 = 1, kInt4 = 2 };

struct Matrix {
  int32_t format, rows, columns, padded_columns;
  const uint8_t* codes;
  const void* scale;
  const uint16_t* minimum;
  const int32_t* sums;
  const float* bias;

  int panels() const { return ceil_div(rows, kLanes); }
  int groups() const { return padded_columns / kGroup; }

  // Only for the formats that tiles read in place.
  size_t panel_bytes() const { return static_cast<size_t>(padded_columns) * kLanes * (format == kDense ? 2 : 1); }
};

}  // namespace sglite
