#include "kernels/format/pack.h"

namespace moebius {

void pack_panel(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel, std::byte* target) {
  pack_panel_reference(source, layout, panel, target);
}

}  // namespace moebius
