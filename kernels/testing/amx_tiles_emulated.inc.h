// Tiles kept in memory, with the interface of amx_tiles.inc.h and the arithmetic of the real ones to the last bit:
// bfloat16 products are summed over even and over odd k apart, then added to the sum; float32 denormals count as
// zero going in and coming out; rounding is to nearest even (Intel SDM volume 2, TDPBF16PS).

struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

struct alignas(64) EmulatedTile {
  uint32_t words[16][16];
};

struct EmulatedState {
  TileConfig config;
  EmulatedTile tiles[8];
};

thread_local EmulatedState emulated;

// Denormals count as zero while one stands. The state lives in memory and the constructor and destructor
// clobber memory, so the compiler can not move the arithmetic out from between them.
class DenormalsAreZero {
 public:
  DenormalsAreZero() : saved_(_mm_getcsr()) { set(saved_ | 0x8040); }
  ~DenormalsAreZero() { set(saved_); }

 private:
  static void set(uint32_t value) { __asm__ volatile("vldmxcsr %0" ::"m"(value) : "memory"); }
  uint32_t saved_;
};

struct Tiles {
  static void configure(const TileConfig& config) { emulated.config = config; }
  static void release() { emulated.config = TileConfig{}; }

  template <int kTile>
  static void zero() {
    emulated.tiles[kTile] = EmulatedTile{};
  }

  template <int kTile>
  static void load(const void* from, size_t stride) {
    EmulatedTile& tile = emulated.tiles[kTile];
    for (int row = 0; row < 16; ++row) {
      const bool inside = row < emulated.config.rows[kTile];
      const std::byte* at = static_cast<const std::byte*>(from) + row * stride;
      _mm512_store_si512(tile.words[row], inside ? _mm512_loadu_si512(at) : _mm512_setzero_si512());
    }
  }

  template <int kTile>
  static void store(void* to, size_t stride) {
    for (int row = 0; row < emulated.config.rows[kTile]; ++row) {
      _mm512_storeu_si512(static_cast<std::byte*>(to) + row * stride,
                          _mm512_load_si512(emulated.tiles[kTile].words[row]));
    }
  }

  template <int kSum, int kRows, int kPanel>
  static void dot_bfloat16() {
    const DenormalsAreZero mode;
    const EmulatedTile& panel = emulated.tiles[kPanel];
    const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    for (int row = 0; row < emulated.config.rows[kRows]; ++row) {
      __m512 even = _mm512_setzero_ps();
      __m512 odd = _mm512_setzero_ps();
      for (int pair = 0; pair < 16; ++pair) {
        const __m512i a = _mm512_set1_epi32(static_cast<int>(emulated.tiles[kRows].words[row][pair]));
        const __m512i b = _mm512_load_si512(panel.words[pair]);
        even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                               _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), even);
        odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high_half)),
                              _mm512_castsi512_ps(_mm512_and_si512(b, high_half)), odd);
      }
      uint32_t* sum = emulated.tiles[kSum].words[row];
      _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), _mm512_add_ps(even, odd)));
    }
  }

  template <int kSum, int kRows, int kPanel>
  static void dot_int8() {
    for (int row = 0; row < emulated.config.rows[kRows]; ++row) {
      __m512i sum = _mm512_load_si512(emulated.tiles[kSum].words[row]);
      for (int four = 0; four < 16; ++four) {
        const __m512i a = _mm512_set1_epi32(static_cast<int>(emulated.tiles[kRows].words[row][four]));
        const __m512i b = _mm512_load_si512(emulated.tiles[kPanel].words[four]);
        const __m512i low = _mm512_madd_epi16(low_bytes(a), low_bytes(b));
        const __m512i high = _mm512_madd_epi16(_mm512_srai_epi16(a, 8), _mm512_srai_epi16(b, 8));
        sum = _mm512_add_epi32(sum, _mm512_add_epi32(low, high));
      }
      _mm512_store_si512(emulated.tiles[kSum].words[row], sum);
    }
  }

 private:
  // Bytes 0 and 2 of every word, sign-extended to its two halves.
  static __m512i low_bytes(__m512i words) { return _mm512_srai_epi16(_mm512_slli_epi16(words, 8), 8); }
};
