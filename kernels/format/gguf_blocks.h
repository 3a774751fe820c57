// Codes, scales and mins of GGUF blocks as packed formats keep them, without any weight decoded. A block's weights mean
// code * scale, or code * scale + minimum. Layouts of blocks: ggml-common.h of https://github.com/ggml-org/ggml.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace moebius {

// Rows of blocks that follow one another.
struct GgufRows {
  const std::byte* first;
  ptrdiff_t row_stride;  // bytes
  uint32_t rows;
  uint32_t blocks;       // of a row
};

// One part of a type's blocks.
struct GgufPart {
  const char* type;  // as ggml names it: "Q4_0"
  const char* part;  // "codes", "scales" or "mins"
  uint32_t block_bytes;
  uint32_t part_bytes;  // of a block
  // Writes rows x blocks x part_bytes, one after the other.
  void (*take)(const GgufRows& source, std::byte* target);
};

// Throws std::invalid_argument naming type and part when no packed format keeps it.
const GgufPart& gguf_part(const std::string& type, const std::string& part);

// All there are.
const std::vector<GgufPart>& gguf_parts();

}  // namespace moebius
