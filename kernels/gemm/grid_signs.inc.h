// Signs of rows of a grid as codes keep them beside numbers, once for both widths. Included INSIDE an anonymous
// namespace. `Vector`: of words, one a column; `Words`: the same for the compiler's operators.

// Seven signs of each eight k, from the four fields of a word; the eighth is 0.
template <class Words, class Vector>
[[gnu::always_inline]] inline Vector seven_signs(Vector fields) {
  const auto word = __builtin_bit_cast(Words, fields);
  return __builtin_bit_cast(
      Vector, (word & 0x7f) | (word << 1 & 0x7f00) | (word << 2 & 0x7f0000) | (word << 3 & 0x7f000000));
}

// All signs of iq3_s: the first are in bytes of their own, the others in upper bits of its three words.
template <class Words, class Vector>
[[gnu::always_inline]] inline Vector signs_of_iq3_s(Vector bytes, Vector first, Vector shared, Vector second) {
  const auto own = __builtin_bit_cast(Words, bytes), a = __builtin_bit_cast(Words, first);
  const auto both = __builtin_bit_cast(Words, shared), b = __builtin_bit_cast(Words, second);
  const Words low = (own & 0xf) | (both >> 5 & 0x7f0) | (a >> 8 & 0x7800) | (a << 6 & 0x8000);
  const Words high = (own << 12 & 0xf0000) | (both << 4 & 0x7f00000) | (b << 8 & 0x78000000) | (b << 22 & 0x80000000);
  return __builtin_bit_cast(Vector, low | high);
}
