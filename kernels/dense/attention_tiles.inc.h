// Attention of many queries to the same keys, once for all widths. Included INSIDE an anonymous namespace of a
// *_<isa>.cc file, after row_kernels.inc.h's types: nothing here may get external linkage.
//
// Lanes of a tile are queries, so that scores, their maxima and sums are columns and nothing is added across lanes.
// Both products are [rows of keys or of value columns] x [lanes], with kTileRows rows and kTileVectors vectors in
// registers. Blocks begin at multiples of kAttendBlock and what a query does not see weighs exactly nothing, so a
// query's bits do not depend on the others of its tile.

constexpr uint32_t kTileRows = Vec::kLanes == 16 ? 8 : 6;
constexpr uint32_t kTileVectors = 2;
constexpr float kUnseen = -__builtin_inff();
// Scores below are of positions that a query does not see, or infinite.
constexpr float kLeastScore = -3.0e38f;

struct TileProduct {
  const float* left;   // [rows][left_stride], or of its transpose
  size_t left_stride;
  const float* right;  // [depth][lanes]
  uint32_t depth;
  uint32_t lanes;
  float* result;       // [rows][lanes]
  const float* kept;   // [lanes]: result = result * kept + product; null: the product
};

template <bool kTransposed, uint32_t kRows>
[[gnu::always_inline]] inline void multiply_tile(const TileProduct& product, uint32_t row, uint32_t lane) {
  const float* const left = product.left + row * (kTransposed ? 1 : product.left_stride);
  float* const result = product.result + size_t{row} * product.lanes + lane;
  Vec sums[kRows][kTileVectors];
  for (uint32_t r = 0; r < kRows; ++r) {
    for (uint32_t v = 0; v < kTileVectors; ++v) {
      const uint32_t at = v * Vec::kLanes;
      sums[r][v] = product.kept == nullptr
                       ? Vec::zero()
                       : Vec::mul(Vec::load(result + size_t{r} * product.lanes + at), Vec::load(product.kept + lane + at));
    }
  }
  const float* right = product.right + lane;
  for (uint32_t k = 0; k < product.depth; ++k, right += product.lanes) {
    Vec parts[kTileVectors];
    for (uint32_t v = 0; v < kTileVectors; ++v) parts[v] = Vec::load(right + v * Vec::kLanes);
#pragma GCC unroll 8
    for (uint32_t r = 0; r < kRows; ++r) {
      const float* const element = kTransposed ? left + k * product.left_stride + r : left + r * product.left_stride + k;
      const Vec factor = Vec::broadcast(*element);
      for (uint32_t v = 0; v < kTileVectors; ++v) sums[r][v] = Vec::fma(factor, parts[v], sums[r][v]);
    }
  }
  for (uint32_t r = 0; r < kRows; ++r) {
    for (uint32_t v = 0; v < kTileVectors; ++v) sums[r][v].store(result + size_t{r} * product.lanes + v * Vec::kLanes);
  }
}

// `rows` is even.
template <bool kTransposed>
void multiply_tiles(const TileProduct& product, uint32_t rows) {
  for (uint32_t lane = 0; lane < product.lanes; lane += kTileVectors * Vec::kLanes) {
    uint32_t row = 0;
    for (; row + kTileRows <= rows; row += kTileRows) multiply_tile<kTransposed, kTileRows>(product, row, lane);
    for (; row < rows; row += 2) multiply_tile<kTransposed, 2>(product, row, lane);
  }
}

// Scores of a block's positions that a lane does not see become kUnseen.
void hide_unseen(const AttendTileWork& work, uint32_t first) {
  for (uint32_t lane = 0; lane < work.lanes; lane += Vec::kLanes) {
    const Vec begins = Vec::load(work.begins + lane);
    const Vec ends = Vec::load(work.ends + lane);
    for (uint32_t i = 0; i < kAttendBlock; ++i) {
      float* const at = work.scores + size_t{i} * work.lanes + lane;
      const Vec position = Vec::broadcast(static_cast<float>(first + i));
      const Vec seen = Vec::where_less(position, ends, Vec::load(at), Vec::broadcast(kUnseen));
      Vec::where_less(position, begins, Vec::broadcast(kUnseen), seen).store(at);
    }
  }
}

// Scores become exp(score - maximum), and `kept` what sums so far are to be multiplied by.
void soften_lanes(const AttendTileWork& work) {
  for (uint32_t lane = 0; lane < work.lanes; lane += Vec::kLanes) {
    const Vec before = Vec::load(work.maxima + lane);
    Vec maximum = before;
    float* const scores = work.scores + lane;
    for (uint32_t i = 0; i < kAttendBlock; ++i) {
      maximum = Vec::max(Vec::load(scores + size_t{i} * work.lanes), maximum);
    }
    const Vec kept = exponential(Vec::sub(before, maximum));
    Vec sum = Vec::mul(Vec::load(work.sums + lane), kept);
    for (uint32_t i = 0; i < kAttendBlock; ++i) {
      float* const at = scores + size_t{i} * work.lanes;
      const Vec score = Vec::load(at);
      const Vec weight = exponential(Vec::sub(score, maximum));
      const Vec seen = Vec::where_less(score, Vec::broadcast(kLeastScore), Vec::zero(), weight);
      seen.store(at);
      sum = Vec::add(sum, seen);
    }
    sum.store(work.sums + lane);
    maximum.store(work.maxima + lane);
    kept.store(work.kept + lane);
  }
}

// Keys or values of a block as float32 [kAttendBlock][head_dim]; zeros outside of what the tile sees.
template <class Type>
void widen_block(const AttendTileWork& work, const std::byte* memory, uint32_t first) {
  for (uint32_t i = 0; i < kAttendBlock; ++i) {
    float* const target = work.block + size_t{i} * work.head_dim;
    const uint32_t position = first + i;
    if (position < work.begin || position >= work.end) {
      __builtin_memset(target, 0, work.head_dim * sizeof(float));
      continue;
    }
    const auto page = static_cast<size_t>(work.pages[position / work.page_size]);
    const size_t slot = page * work.page_size + position % work.page_size;
    const auto* const source = reinterpret_cast<const typename Type::Element*>(memory + slot * work.slot_bytes);
    for (uint32_t d = 0; d < work.head_dim; d += Vec::kLanes) Type::load(source + d).store(target + d);
  }
}

template <class Type>
void attend_tile_typed(const AttendTileWork& work) {
  for (uint32_t lane = 0; lane < work.lanes; ++lane) {
    work.maxima[lane] = kLeastScore;
    work.sums[lane] = 0.0f;
  }
  __builtin_memset(work.output, 0, size_t{work.head_dim} * work.lanes * sizeof(float));
  for (uint32_t first = work.begin / kAttendBlock * kAttendBlock; first < work.end; first += kAttendBlock) {
    widen_block<Type>(work, work.keys, first);
    multiply_tiles<false>({work.block, work.head_dim, work.query, work.head_dim, work.lanes, work.scores, nullptr},
                          kAttendBlock);
    if (first < work.all_begin || first + kAttendBlock > work.all_end) hide_unseen(work, first);
    soften_lanes(work);
    widen_block<Type>(work, work.values, first);
    multiply_tiles<true>({work.block, work.head_dim, work.scores, kAttendBlock, work.lanes, work.output, work.kept},
                         work.head_dim);
  }
}

void attend_tile(const AttendTileWork& work) {
  switch (work.page_type) {
    case PageType::kFloat32: return attend_tile_typed<Float32>(work);
    case PageType::kBFloat16: return attend_tile_typed<BFloat16>(work);
    case PageType::kFloat8: return attend_tile_typed<Float8>(work);
  }
}
