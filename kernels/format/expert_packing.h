// A whole expert from a checkpoint's matrices to its packed form.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/panel_layout.h"
#include "kernels/format/requantise.h"
#include "kernels/format/source_matrix.h"

namespace moebius {

// One expert's matrices; `gate` is not read where the layout has none.
struct ExpertSource {
  SourceMatrix gate;  // [intermediate, hidden]
  SourceMatrix up;    // [intermediate, hidden]
  SourceMatrix down;  // [hidden, intermediate]
};

// Packs an expert into target[layout.expert_bytes], 64-byte aligned: each matrix exactly where it can be, else
// requantised (requantise.h). Returns the sums of the error that this made; matrices packed exactly add nothing to squared_error, and to squared_reference
// nothing either. Throws std::invalid_argument naming the matrix when a shape differs or a format can not be made.
// Callable from several threads.
PackError pack_expert(const ExpertLayout& layout, const ExpertSource& source, std::byte* target);

// The same in parts, for threads that share one expert: part i < intermediate_blocks is a column block (its gate
// and up panels), the others are one down panel each. `target` is the expert's begin. Parts that share cache
// lines of the source are neighbours, so ranges of 8 and more are best.
uint32_t expert_parts(const ExpertLayout& layout);
PackError pack_expert_parts(const ExpertLayout& layout, const ExpertSource& source, uint32_t begin, uint32_t end,
                            std::byte* target);

}  // namespace moebius
