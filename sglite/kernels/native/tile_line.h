// Products by tiles: all rows times a pair of panels, one unit of rows after the other.
//
// The tile unit and the vector units work side by side: while tiles multiply, the sums that the unit before has left
// become results, a few rows at every step. A pair of panels too large for the L1 cache is taken in several stretches
// of columns; what a stretch leaves is the start of the next, so that every sum is made in the same order.
#pragma once

#include "linear.h"

#if SGLITE_AMX

namespace sglite {

// The weights of the next pair of panels, brought to the L2 cache while this pair is at work: a slice at every step.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const uint8_t* a, const uint8_t* b, size_t panel_bytes, int steps)
      : a_(a), b_(b), slice_(round_up(ceil_div(static_cast<int>(panel_bytes), steps), 64)), left_(panel_bytes) {}

  void step() {
    if (left_ <= 0) return;
    for (int line = 0; line < slice_; line += 64) {
      _mm_prefetch(a_ + line, _MM_HINT_T1);
      _mm_prefetch(b_ + line, _MM_HINT_T1);
    }
    a_ += slice_;
    b_ += slice_;
    left_ -= slice_;
  }

 private:
  const uint8_t *a_ = nullptr, *b_ = nullptr;
  int slice_ = 0;
  int64_t left_ = 0;
};

// What the tiles have left of one unit of rows: for int8 [high a, high b, low a, low b], for bf16 [rows 0 to 15 a and
// b, rows 16 to 31 a and b].
struct TileSums {
  alignas(64) int32_t tile[4][kTileRows][kLanes];
};

using LineSums = TileSums[kBlockRows / kTileRows];

// A product of tiles in the format F at hand.
#define SGLITE_DOT(sum, left, right)      \
  if constexpr (F == kInt8) {             \
    TILE_DOT_INT8(sum, left, right);      \
  } else {                                \
    TILE_DOT_BF16(sum, left, right);      \
  }

// A tile of x, in a function that knows whether it is Passing.
#define SGLITE_LOAD_LEFT(tile, x)     \
  if constexpr (Passing) {            \
    TILE_LOAD_PASSING(tile, x, 64);   \
  } else {                            \
    TILE_LOAD(tile, x, 64);           \
  }

// F: kInt8 or kDense. sink(row, a, b, ya, yb) takes each row's 16 results of either panel.
template <Format F, class Sink>
class TileLine {
 public:
  static constexpr int kRows = F == kInt8 ? kTileRows : 2 * kTileRows;  // of a unit
  static constexpr int kColumns = F == kInt8 ? 64 : 32;                 // of a step

  TileLine(const Matrix& w, const Activations& x, LineSums& sums, const Sink& sink)
      : w_(w), x_(x), sums_(sums), sink_(sink), panel_bytes_(w.panel_bytes()), steps_(w.padded_columns / kColumns) {}

  // The pair after this one, whose weights will be called for meanwhile.
  void look_ahead(int rows, int a, int b) {
    const int steps = ceil_div(rows, kRows) * steps_;
    ahead_ = Ahead(w_.codes + a * panel_bytes_, w_.codes + b * panel_bytes_, panel_bytes_, steps);
  }

  void multiply(int rows, int a, int b) {
    const int units = ceil_div(rows, kRows), stretch = units < kManyUnits ? steps_ : stretch_steps();
    for (int begin = 0; begin < steps_; begin += stretch) {
      const int end = std::min(begin + stretch, steps_);
      for (int unit = 0; unit < units; ++unit) {
        const Part part{unit * kRows, std::min(kRows, rows - unit * kRows), a, b, &sums_[stretch < steps_ ? unit : 0]};
        units < kManyUnits ? run<false>(part, begin, end) : run<true>(part, begin, end);
        if (end == steps_) waiting_ = part, done_ = 0;
      }
    }
  }

  // Finishes what is left.
  void drain() { finish(kRows); }

 private:
  struct Part {
    int row = 0, rows = 0, a = 0, b = 0;
    TileSums* sums = nullptr;
  };

  static constexpr int kManyUnits = 4;
  static constexpr size_t kNearBytes = 40 * 1024;  // of weights that stay in the L1 cache while rows pass by

  int stretch_steps() const {
    const int stretches = ceil_div(static_cast<int>(2 * panel_bytes_), kNearBytes);
    return ceil_div(steps_, stretches);
  }

  // Steps [begin, end) of a part. The second tile of x: for int8 the low bytes, for bf16 the next rows, if there are.
  // Passing: so many rows go by that only the weights can stay in the L1 cache.
  template <bool Passing>
  void run(const Part& part, int begin, int end) {
    constexpr int kStep = F == kInt8 ? 2048 : 1024;
    const uint8_t *wa = w_.codes + part.a * panel_bytes_ + begin * 1024, *wb = w_.codes + part.b * panel_bytes_ + begin * 1024;
    const bool second = F == kInt8 || part.rows > kTileRows;
    const uint8_t* x0 = x_.tile_row(part.row) + begin * kStep;
    const uint8_t* x1 = F == kInt8 ? x0 + 1024 : second ? x_.tile_row(part.row + kTileRows) + begin * kStep : x0;
    const int rows_a_step = ceil_div(kRows, end - begin);
    start(*part.sums, begin > 0, second);
    for (int k = begin; k < end; ++k, wa += 1024, wb += 1024, x0 += kStep, x1 += kStep) {
      SGLITE_LOAD_LEFT(4, x0);
      TILE_LOAD(6, wa, 64);
      SGLITE_DOT(0, 4, 6);
      TILE_LOAD(7, wb, 64);
      SGLITE_DOT(1, 4, 7);
      if (second) {
        SGLITE_LOAD_LEFT(5, x1);
        SGLITE_DOT(2, 5, 6);
        SGLITE_DOT(3, 5, 7);
      }
      ahead_.step();
      finish(rows_a_step);
    }
    store(*part.sums, second);
  }

  static void start(TileSums& sums, bool resume, bool all) {
    if (resume) {
      TILE_LOAD(0, sums.tile[0], 64);
      TILE_LOAD(1, sums.tile[1], 64);
      if (!all) return;
      TILE_LOAD(2, sums.tile[2], 64);
      TILE_LOAD(3, sums.tile[3], 64);
    } else {
      TILE_ZERO(0);
      TILE_ZERO(1);
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
  }

  static void store(TileSums& sums, bool all) {
    TILE_STORE(0, sums.tile[0], 64);
    TILE_STORE(1, sums.tile[1], 64);
    if (!all) return;
    TILE_STORE(2, sums.tile[2], 64);
    TILE_STORE(3, sums.tile[3], 64);
  }

  // Up to `count` more rows of the part that waits.
  void finish(int count) {
    for (const int end = std::min(done_ + count, waiting_.rows); done_ < end; ++done_) finish_row(waiting_, done_);
  }

  void finish_row(const Part& part, int r) const {
    const auto& tile = part.sums->tile;
    const int row = part.row + r, half = r / kTileRows * 2, i = r % kTileRows;
    __m512 ya, yb;
    if constexpr (F == kInt8) {
      const float* scale = static_cast<const float*>(w_.scale);
      const float row_scale = x_.scale(row);
      ya = exact_value(_mm512_load_si512(tile[0][i]), _mm512_load_si512(tile[2][i]), _mm512_loadu_ps(scale + part.a * kLanes), row_scale);
      yb = exact_value(_mm512_load_si512(tile[1][i]), _mm512_load_si512(tile[3][i]), _mm512_loadu_ps(scale + part.b * kLanes), row_scale);
    } else {
      ya = _mm512_castsi512_ps(_mm512_load_si512(tile[half][i]));
      yb = _mm512_castsi512_ps(_mm512_load_si512(tile[half + 1][i]));
    }
    sink_(row, part.a, part.b, ya, yb);
  }

  const Matrix& w_;
  const Activations& x_;
  LineSums& sums_;
  const Sink& sink_;
  const size_t panel_bytes_;
  const int steps_;
  Ahead ahead_;
  Part waiting_;
  int done_ = 0;
};

}  // namespace sglite

#endif
