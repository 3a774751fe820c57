// Products of eight rows at a time with packed panels on tensor cores: what a warp does for its 32 columns. A part of
// grouped_panels.cu, pair_panels.cu and dense_panels.cu, after panel_codes.cuh.
//
// Weights are the matrix A of mma.m16n8k16, whose 16 rows are columns of panels, and rows of activations are B, so that
// eight rows of an expert fill a tile. A word of a line of 4-bit codes holds eight k of one column, in pairs that a
// shift and a mask bring to the two halves of a register (panel_layout.h): two registers of A for each of two products.
// Which k a product calls its first is free as long as A and B agree: a lane takes from memory eight neighbouring k of
// four neighbouring columns, 16 bytes or, of wider codes, of more lines, and of a row of activations those same eight
// k, 16 bytes. Nothing is exchanged between lanes, and nothing is shuffled.
//
// A warp computes 32 columns: 16 of a panel P in lanes whose group (lane / 4) is below 4, 16 of a panel Q in the
// others. P is gate's and Q up's of the same channels, or they are neighbours. What a lane loads it loads kAhead steps
// before it multiplies, into registers: there is no shared memory, and no barrier.
//
// Codes are multiplied as they are, which bfloat16 holds exactly, and the sum of a group is scaled in float32: as
// panel_parts.py does.

// Sums of a group's products, and of its rows; they are scaled when it ends.
template <class Panel, int kTiles>
struct Sums {
  float products[kTiles][2][4];
  float rows[Step<Panel>::kGroups][kTiles][4];
};

// A row's eight k where they belong to one of a step's groups, else zeros: of two groups each has two lanes of four.
template <class Panel>
static __device__ __forceinline__ uint4 rows_of_group(const uint4& x, int each, int lane) {
  const bool is_own = Step<Panel>::kGroups == 1 || (lane >> 1 & 1) == each;
  return is_own ? x : make_uint4(0, 0, 0, 0);
}

// One step: adds to `sums` its products, and to `total` a group's that ends.
template <class Panel, int kTiles>
static __device__ __forceinline__ void multiply_step(float (&total)[kTiles][2][4], Sums<Panel, kTiles>& sums,
                                                     const Step<Panel>& step, const uint4 (&x)[kTiles], bool ends_group,
                                                     int lane) {
  constexpr int kGroups = Step<Panel>::kGroups;
  if constexpr (Panel::kMins) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int each = 0; each < kGroups; ++each) {
        const uint4 own = rows_of_group<Panel>(x[tile], each, lane);
        multiply_add(sums.rows[each][tile], kOnes, kOnes, kOnes, kOnes, own.x, own.y);
        multiply_add(sums.rows[each][tile], kOnes, kOnes, kOnes, kOnes, own.z, own.w);
      }
    }
  }
  float scale[kGroups][4], minimum[kGroups][4];
#pragma unroll
  for (int each = 0; each < kGroups; ++each) {
    if (ends_group) group_of<Panel>(scale[each], minimum[each], step, each);
  }
#pragma unroll
  for (int two = 0; two < 2; ++two) {
    u32 first[4], second[4];
    decode_column<Panel>(first, step, 2 * two, lane);
    decode_column<Panel>(second, step, 2 * two + 1, lane);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float (&sum)[4] = sums.products[tile][two];
#pragma unroll
      for (int each = 0; each < kGroups; ++each) {
        const uint4 own = rows_of_group<Panel>(x[tile], each, lane);
        multiply_add(sum, first[0], second[0], first[1], second[1], own.x, own.y);
        multiply_add(sum, first[2], second[2], first[3], second[3], own.z, own.w);
        if (!ends_group) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& result = total[tile][two][i];
          result += sum[i] * scale[each][2 * two + i / 2];
          if constexpr (Panel::kMins) result += sums.rows[each][tile][i & 1] * minimum[each][2 * two + i / 2];
          sum[i] = 0;
        }
      }
    }
  }
  if (!ends_group) return;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int each = 0; each < kGroups; ++each) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.rows[each][tile][i] = 0;
    }
  }
}

// Adds to `total` the products of rows with the columns of a lane's panel: [tile of rows][pair of columns]
// [column, row], columns 2 c and 2 c + 1 of its four, rows 2 (lane % 4) and the next one. `rows`: where the lane's
// eight k of row lane / 4 of each tile begin. Of all steps of k it takes those of share `share`; `ready` is called when
// weights are under way, and returns once rows may be read.
template <class Panel, int kTiles, int kShares, class Ready>
static __device__ __forceinline__ void multiply(float (&total)[kTiles][2][4], const u8* panel,
                                                const u8* const (&rows)[kTiles], int lane, int share, Ready ready) {
  constexpr int kParts = (Panel::kK + kPart - 1) / kPart, kPartsOfGroup = Panel::kPartsOfGroup, kAhead = Panel::kAhead;
  constexpr int kEach = (kParts + kShares - 1) / kShares;
  const int first = share * kEach;
  // Rows of activations, which are in a cache, are loaded fewer steps ahead where they take many registers.
  constexpr int kRowsAhead = kTiles == 1 || kAhead < 2 ? kAhead : 2;
  const int own_k = (lane & 3) * 8;
  Step<Panel> steps[kAhead];
  uint4 x[kRowsAhead][kTiles];
  Sums<Panel, kTiles> sums = {};
  const auto load_weights = [&](Step<Panel>& target, int n) {
    // Behind the last part lies another panel: the last one is read again, and meets no rows.
    load<Panel>(target, panel, kShares == 1 || first + n < kParts ? first + n : kParts - 1, lane);
  };
  const auto load_rows = [&](uint4(&target)[kTiles], int n) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      // No whole step of k is left at the end of some rows.
      const bool is_whole = Panel::kK % kPart == 0 && kShares == 1;
      const bool is_inside = is_whole || (first + n) * kPart + own_k < Panel::kK;
      target[tile] = is_inside ? load_row(rows[tile] + (first + n) * kPart * 2) : make_uint4(0, 0, 0, 0);
    }
  };
#pragma unroll
  for (int n = 0; n < kAhead && n < kEach; ++n) load_weights(steps[n], n);
  ready();
#pragma unroll
  for (int n = 0; n < kRowsAhead && n < kEach; ++n) load_rows(x[n], n);
  for (int begin = 0; begin < kEach; begin += kAhead) {
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int n = begin + ahead;
      if (kEach % kAhead != 0 && n >= kEach) break;
      const bool ends_group = kPartsOfGroup == 1 || (first + n) % kPartsOfGroup == kPartsOfGroup - 1 || n == kEach - 1;
      multiply_step<Panel, kTiles>(total, sums, steps[ahead], x[ahead % kRowsAhead], ends_group, lane);
      if (n + kAhead < kEach) load_weights(steps[ahead], n + kAhead);
      if (n + kRowsAhead < kEach) load_rows(x[ahead % kRowsAhead], n + kRowsAhead);
    }
  }
}
