// AMX tiles: their shapes and the few instructions used, with the memory they touch declared to the compiler.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "common.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define SGLITE_AMX 1
#else
#define SGLITE_AMX 0
#endif

namespace sglite {

// Asks the kernel, once per process, for the right to use tiles.
inline bool amx_granted() {
#if SGLITE_AMX
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

#if SGLITE_AMX

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};

  void set(int tile, int tile_rows, int row_bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    bytes[tile] = static_cast<uint16_t>(row_bytes);
  }
};

// Tiles 0 to 3 are sums, 4 and 5 left operands, 6 and 7 right operands. For products all are full; attention needs 5
// and 7 for half a step, where a head's size is an odd multiple of 16: 16 columns of bf16 and 8 rows of pairs.
inline TileShapes tile_shapes(bool attention) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, 16, 64);
  if (attention) {
    shapes.set(5, 16, 32);
    shapes.set(7, 8, 64);
  }
  return shapes;
}
inline void load_shapes(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }

#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, p, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"(static_cast<long>(stride)) : "memory")
// The same for what is not needed again soon: it leaves what is in the L1 cache alone.
#define TILE_LOAD_PASSING(t, p, stride) \
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #t ::"r"(p), "r"(static_cast<long>(stride)) : "memory")
#define TILE_STORE(t, p, stride) \
  asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"(static_cast<long>(stride)) : "memory")
#define TILE_DOT_BF16(sum, left, right) asm volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #sum ::)
#define TILE_DOT_INT8(sum, left, right) asm volatile("tdpbssd %%tmm" #right ", %%tmm" #left ", %%tmm" #sum ::)
#define TILE_RELEASE() asm volatile("tilerelease" ::)

#endif

// The tile unit goes to sleep after about 1,000 cycles without work, and waking it costs about 800 (measured on
// Sapphire and Emerald Rapids). Long stretches of vector code between tile products call this now and then; it spoils
// tile 0.
inline void keep_tiles_awake() {
#if SGLITE_AMX
  TILE_DOT_BF16(0, 4, 6);
#endif
}

}  // namespace sglite
