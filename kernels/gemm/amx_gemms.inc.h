// The GEMMs on tiles of a format, and the table. Included INSIDE an anonymous namespace, last.

constexpr Blocking kFoldedBlocking{256, 64, 2, 8192};
constexpr Blocking kGroupedBlocking{0, 8, 0, 0};

// Formats whose group scales are part of the tiles.
bool folds_scales(const WeightFormat& format) {
  if (format.group_size == 0) return true;
  if (format.panel_scale || (format.code != Code::kFloat4 && format.code != Code::kFloat8)) return false;
  if (format.scale == ScaleType::kE8M0) return format.group_size == 32;
  return format.code == Code::kFloat4 && format.scale == ScaleType::kE4M3 && format.group_size == 16;
}

// Formats whose tiles are the weights in two parts, for any number of rows.
bool makes_weights(const WeightFormat& format) {
  if (format.code > Code::kFloat4) return true;
  const bool integers = format.code == Code::kInt4 || format.code == Code::kInt8;
  if (!integers || format.zeros || format.panel_scale) return false;
  if (format.scale == ScaleType::kProducts) return true;
  if (format.scale != ScaleType::kFloat16) return false;
  return format.mins || format.group_size == 16;
}

bool supports_bfloat16(const WeightFormat& format) {
  if (format.code == Code::kFloat32 || format.quantised_rows) return false;
  if (folds_scales(format)) return true;
  if (makes_weights(format)) return true;
  if (format.group_size % kTileK != 0 || format.code == Code::kFloat16 || format.code == Code::kBFloat16) return false;
  if (format.panel_scale || format.code == Code::kFloat8) return format.scale == ScaleType::kFloat32;
  return format.scale == ScaleType::kBFloat16 || format.scale == ScaleType::kFloat16;
}

bool supports_int8(const WeightFormat& format) { return format.quantised_rows && format.group_size == 0; }

template <class Source>
void run_folded(const GemmWork& work, const Blocking& blocking) {
  FoldedGemm<BFloat16Dot, FloatEnd, Source>(work, blocking).run();
}

template <class Source>
void run_grouped(const GemmWork& work, const Blocking& blocking) {
  if (work.num_rows > kTileRows) return run_grouped_rows<Source>(work);
  GroupedGemm<Source>(work, blocking).run();
}

void run_bfloat16_folded(const GemmWork& work, const Blocking& blocking) {
  const WeightFormat& format = work.layout->format;
  switch (format.code) {
    case Code::kBFloat16: return run_folded<PackedTiles>(work, blocking);
    case Code::kFloat16: return run_folded<Float16Tiles>(work, blocking);
    case Code::kFloat8:
      if (format.group_size == 0) return run_folded<CodeTiles<Code::kFloat8>>(work, blocking);
      return run_folded<PowerTiles<Code::kFloat8>>(work, blocking);
    case Code::kInt8: return run_folded<CodeTiles<Code::kInt8>>(work, blocking);
    case Code::kInt4: return run_folded<CodeTiles<Code::kInt4>>(work, blocking);
    case Code::kFloat4:
      if (format.group_size == 0) return run_folded<CodeTiles<Code::kFloat4>>(work, blocking);
      if (format.scale == ScaleType::kE8M0) return run_folded<PowerTiles<Code::kFloat4>>(work, blocking);
      return run_folded<Nvfp4Tiles>(work, blocking);
    default: return;
  }
}

// Where two products a tile are faster than scaling sums, measured on Emerald Rapids: a group of 32 is scaled after
// every product, and up to 32 rows meet each tile once or twice.
constexpr uint32_t kSplitRows = 128;

bool splits(const WeightFormat& format, uint32_t num_rows) {
  const bool integers = format.code == Code::kInt4 || format.code == Code::kInt8;
  if (!integers || format.panel_scale || num_rows <= kTileRows) return false;
  return format.group_size == 32 || num_rows <= kBlockRows || (format.group_size == 64 && num_rows >= kSplitRows);
}

void run_split(const GemmWork& work) {
  const WeightFormat& format = work.layout->format;
  if (format.code == Code::kInt8) {
    if (format.scale == ScaleType::kBFloat16) {
      return run_folded<Int8WeightTiles<ScaleType::kBFloat16>>(work, kFoldedBlocking);
    }
    return run_folded<Int8WeightTiles<ScaleType::kFloat16>>(work, kFoldedBlocking);
  }
  if (format.zeros) return run_folded<SplitTiles<Int4ZerosTiles>>(work, kFoldedBlocking);
  run_folded<SplitTiles<CodeTiles<Code::kInt4>>>(work, kFoldedBlocking);
}

template <int kBits, ScaleType kType>
void run_small(const GemmWork& work) {
  run_folded<WeightTiles<SmallDecoder<kBits>, kType>>(work, kFoldedBlocking);
}

template <ScaleType kType>
void run_weights_scaled_by(const GemmWork& work) {
  switch (work.layout->format.code) {
    case Code::kInt2: return run_small<2, kType>(work);
    case Code::kInt3: return run_small<3, kType>(work);
    case Code::kIq4: return run_small<4, kType>(work);
    case Code::kInt5: return run_small<5, kType>(work);
    case Code::kInt6: return run_small<6, kType>(work);
    default: break;
  }
  if (work.layout->format.code == Code::kInt8) return run_folded<Int8WeightTiles<kType>>(work, kFoldedBlocking);
  if (work.layout->format.mins) return run_folded<WeightTiles<UnsignedInt4Decoder, kType>>(work, kFoldedBlocking);
  run_folded<WeightTiles<CodeDecoder<Code::kInt4>, kType>>(work, kFoldedBlocking);
}

void run_weights(const GemmWork& work) {
  if (work.layout->format.scale == ScaleType::kProducts) return run_weights_scaled_by<ScaleType::kProducts>(work);
  run_weights_scaled_by<ScaleType::kFloat16>(work);
}

void run_bfloat16_grouped(const GemmWork& work, const Blocking& blocking) {
  const WeightFormat& format = work.layout->format;
  if (format.zeros) return run_grouped<Int4ZerosTiles>(work, blocking);
  switch (format.code) {
    case Code::kFloat8: return run_grouped<CodeTiles<Code::kFloat8>>(work, blocking);
    case Code::kInt8: return run_grouped<CodeTiles<Code::kInt8>>(work, blocking);
    case Code::kInt4: return run_grouped<CodeTiles<Code::kInt4>>(work, blocking);
    case Code::kFloat4: return run_grouped<CodeTiles<Code::kFloat4>>(work, blocking);
    default: return;
  }
}

void run_int8_blocking(const GemmWork& work, const Blocking& blocking) {
  FoldedGemm<Int8Dot, Int32End, PackedTiles>(work, blocking).run();
}

void run_bfloat16(const GemmWork& work) {
  if (folds_scales(work.layout->format)) return run_bfloat16_folded(work, kFoldedBlocking);
  if (makes_weights(work.layout->format)) return run_weights(work);
  if (splits(work.layout->format, work.num_rows)) return run_split(work);
  run_bfloat16_grouped(work, kGroupedBlocking);
}

void run_int8(const GemmWork& work) { run_int8_blocking(work, kFoldedBlocking); }

// Those whose scales are applied to sums.
bool scales_sums(const WeightFormat& format) {
  return supports_bfloat16(format) && !folds_scales(format) && !makes_weights(format) && format.code != Code::kFloat4;
}

void run_bfloat16_panels(const GemmWork& work) {
  const WeightFormat& format = work.layout->format;
  if (format.zeros) return run_grouped_panels<Int4ZerosTiles>(work);
  switch (format.code) {
    case Code::kFloat8: return run_grouped_panels<CodeTiles<Code::kFloat8>>(work);
    case Code::kInt8: return run_grouped_panels<CodeTiles<Code::kInt8>>(work);
    default: return run_grouped_panels<CodeTiles<Code::kInt4>>(work);
  }
}

size_t panels_scratch_bytes(const PanelLayout& layout, uint32_t /*num_panels*/, uint32_t num_rows) {
  return PanelsScratch(layout, num_rows).bytes;
}

size_t scratch_bytes(const PanelLayout& layout, uint32_t num_panels, uint32_t num_rows) {
  const WeightFormat& format = layout.format;
  if (folds_scales(format)) {
    return folded_scratch_bytes(kFoldedBlocking, format.code == Code::kFloat16 ? 2 : 1, num_rows);
  }
  if (makes_weights(format)) return folded_scratch_bytes(kFoldedBlocking, 2, num_rows);
  const size_t grouped = num_rows > kTileRows ? RowsScratch(layout, num_panels, num_rows).bytes
                                              : grouped_scratch_bytes(layout, kGroupedBlocking);
  const size_t split = splits(format, num_rows) ? folded_scratch_bytes(kFoldedBlocking, 2, num_rows) : 0;
  return grouped > split ? grouped : split;
}
