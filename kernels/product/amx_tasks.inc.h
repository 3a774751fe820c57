// Vector work for the next piece of weights, done a step at a time beside the products of this one. Included INSIDE
// an anonymous namespace.
//
// A step is a call, not inlined into the products: one copy of a decoder instead of one per shape of block, and the
// call costs little beside the tile it makes.

constexpr uint32_t kTileRows = 16;
constexpr size_t kTileBytes = 1024;

// Up to two panels over some steps of k.
struct Piece {
  const std::byte* panels[2];  // where they begin, not where the steps do
  uint32_t num_panels;         // 0: nothing left to do
  uint32_t begin;
  uint32_t steps;

  const std::byte* codes(uint32_t p, uint32_t lines_per_step) const {
    return panels[p] + begin * size_t{lines_per_step} * 64;
  }
};

struct Task {
  void (*work)(Task& task) = nullptr;
  const void* source = nullptr;      // of decoding: the Source
  const std::byte* panel = nullptr;  // being decoded
  const std::byte* second_panel = nullptr;
  const std::byte* fetch[2] = {};    // what to fetch next, of each panel
  std::byte* target = nullptr;       // next tile
  uint32_t begin = 0;                // of the piece
  uint32_t steps = 0;                // of k of the piece
  uint32_t lines = 0;                // of fetching: per step
  uint32_t done = 0;
  uint32_t total = 0;                // steps of work
  uint32_t pace = 0;                 // steps of work per step of products, as a 65536th
  uint32_t due = 0;                  // the same, not yet done

  // Once for each step of products. Work is spread evenly over them: lines that are fetched and lines that products
  // read share a few buffers.
  [[gnu::always_inline]] void step() {
    due += pace;
    if (due < 65536) return;
    due -= 65536;
    if (done < total) work(*this);
  }
};

uint32_t pace_of(uint32_t work_steps, uint32_t product_steps) {
  return work_steps < product_steps ? (work_steps * 65536 + product_steps - 1) / product_steps : 65536;
}

void fetch_step(Task& task) {
  for (uint32_t line = 0; line < task.lines; ++line) _mm_prefetch(task.fetch[0] + 64 * line, _MM_HINT_T1);
  task.fetch[0] += 64 * task.lines;
  if (++task.done == task.steps) task.fetch[0] = task.fetch[1];
}

// Fetches a piece, one panel after the other.
Task fetch_task(const Piece& next, uint32_t lines_per_step, uint32_t product_steps) {
  Task task;
  if (next.num_panels == 0) return task;
  task.work = fetch_step;
  task.fetch[0] = next.codes(0, lines_per_step);
  task.fetch[1] = next.codes(next.num_panels - 1, lines_per_step);
  const uint32_t lines = next.steps * lines_per_step;  // of a panel
  task.lines = (lines * next.num_panels + product_steps - 1) / product_steps;
  task.steps = lines / task.lines;
  task.total = task.steps * next.num_panels;
  task.pace = pace_of(task.total, product_steps);
  return task;
}

// One tile of the next piece, and the codes of the same tile of the piece after it.
template <class Source>
[[gnu::noinline]] void decode_step(Task& task) {
  const Source& source = *static_cast<const Source*>(task.source);
  const uint32_t p = task.done >= task.steps ? 1 : 0;
  if (p == 1 && task.done == task.steps) task.panel = task.second_panel;
  const uint32_t step = task.begin + task.done - p * task.steps;
  const std::byte* fetch = task.fetch[p];
  for (uint32_t line = 0; line < Source::kLines; ++line) _mm_prefetch(fetch + 64 * line, _MM_HINT_T1);
  task.fetch[p] += 64 * Source::kLines;
  source.decode(task.panel, step, reinterpret_cast<uint16_t*>(task.target));
  task.target += Source::kParts * kTileBytes;
  ++task.done;
}

template <class Source>
Task decode_task(const Source& source, const Piece& next, const Piece& after_next, std::byte* buffer,
                 uint32_t product_steps) {
  Task task;
  if (next.num_panels == 0) return task;
  const Piece& fetched = after_next.num_panels > 0 ? after_next : next;
  task.work = decode_step<Source>;
  task.source = &source;
  task.panel = next.panels[0];
  task.second_panel = next.panels[next.num_panels - 1];
  task.fetch[0] = fetched.codes(0, Source::kLines);
  task.fetch[1] = fetched.codes(fetched.num_panels - 1, Source::kLines);
  task.target = buffer;
  task.begin = next.begin;
  task.steps = next.steps;
  task.total = next.steps * next.num_panels;
  task.pace = pace_of(task.total, product_steps);
  return task;
}

void finish_task(Task& task) {
  while (task.done < task.total) task.work(task);
}
