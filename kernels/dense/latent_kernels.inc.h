// Products of few rows with the matrices of heads, once for all widths. Included INSIDE an anonymous namespace of a
// *_<isa>.cc file, after row_kernels.inc.h's types: nothing here may get external linkage.
//
// Such a product reads its matrix from memory for a handful of rows: rows that share a loaded vector are what is gained.

// output[row ...][column ...] = rows x matrix, of kRows rows and kVectors vectors of columns.
template <class Type, uint32_t kRows, uint32_t kVectors>
void multiply_columns(const HeadProductWork& work, uint32_t row, uint32_t column) {
  const float* const factors = work.rows + size_t{row} * work.matrix_rows;
  const auto* matrix = static_cast<const typename Type::Element*>(work.matrix) + column;
  Vec sums[kRows][kVectors];
  for (uint32_t r = 0; r < kRows; ++r) {
    for (uint32_t v = 0; v < kVectors; ++v) sums[r][v] = Vec::zero();
  }
  for (uint32_t i = 0; i < work.matrix_rows; ++i, matrix += work.matrix_stride) {
    Vec parts[kVectors];
    for (uint32_t v = 0; v < kVectors; ++v) parts[v] = Type::load(matrix + v * Vec::kLanes);
    for (uint32_t r = 0; r < kRows; ++r) {
      const Vec factor = Vec::broadcast(factors[size_t{r} * work.matrix_rows + i]);
      for (uint32_t v = 0; v < kVectors; ++v) sums[r][v] = Vec::fma(factor, parts[v], sums[r][v]);
    }
  }
  auto* const output = static_cast<typename Type::Element*>(work.output) + row * work.output_stride + column;
  for (uint32_t r = 0; r < kRows; ++r) {
    for (uint32_t v = 0; v < kVectors; ++v) Type::store(sums[r][v], output + r * work.output_stride + v * Vec::kLanes);
  }
}

// output[row ...][first ...] = rows x matrix^T, of kRows rows and kOutputs rows of the matrix.
template <class Type, uint32_t kRows, uint32_t kOutputs>
void multiply_matrix_rows(const HeadProductWork& work, uint32_t row, uint32_t first) {
  const float* const rows = work.rows + size_t{row} * work.matrix_columns;
  const auto* const matrix = static_cast<const typename Type::Element*>(work.matrix) + first * work.matrix_stride;
  Vec sums[kOutputs][kRows];
  for (uint32_t o = 0; o < kOutputs; ++o) {
    for (uint32_t r = 0; r < kRows; ++r) sums[o][r] = Vec::zero();
  }
  for (uint32_t i = 0; i < work.matrix_columns; i += Vec::kLanes) {
    Vec values[kRows];
    for (uint32_t r = 0; r < kRows; ++r) values[r] = Vec::load(rows + size_t{r} * work.matrix_columns + i);
    for (uint32_t o = 0; o < kOutputs; ++o) {
      const Vec weight = Type::load(matrix + o * work.matrix_stride + i);
      for (uint32_t r = 0; r < kRows; ++r) sums[o][r] = Vec::fma(weight, values[r], sums[o][r]);
    }
  }
  auto* const output = static_cast<typename Type::Element*>(work.output) + row * work.output_stride + first;
  for (uint32_t o = 0; o < kOutputs; ++o) {
    for (uint32_t r = 0; r < kRows; ++r) store_one<Type>(sum_of(sums[o][r]), output + r * work.output_stride + o);
  }
}

template <class Type, uint32_t kRows>
void head_product_of(const HeadProductWork& work, uint32_t row) {
  constexpr uint32_t kColumns = kVectorsTogether * Vec::kLanes;
  uint32_t column = 0;
  for (; column + kColumns <= work.matrix_columns; column += kColumns) {
    multiply_columns<Type, kRows, kVectorsTogether>(work, row, column);
  }
  for (; column < work.matrix_columns; column += Vec::kLanes) multiply_columns<Type, kRows, 1>(work, row, column);
}

template <class Type, uint32_t kRows>
void transposed_product_of(const HeadProductWork& work, uint32_t row) {
  // As many sums as there are registers.
  constexpr uint32_t kOutputs = Vec::kLanes == 8 && kRows == 4 ? 2 : 4;
  uint32_t first = 0;
  for (; first + kOutputs <= work.matrix_rows; first += kOutputs) {
    multiply_matrix_rows<Type, kRows, kOutputs>(work, row, first);
  }
  for (; first < work.matrix_rows; ++first) multiply_matrix_rows<Type, kRows, 1>(work, row, first);
}

template <class Type>
void head_product_typed(const HeadProductWork& work) {
  uint32_t row = 0;
  for (; row + 4 <= work.num_rows; row += 4) head_product_of<Type, 4>(work, row);
  for (; row + 2 <= work.num_rows; row += 2) head_product_of<Type, 2>(work, row);
  if (row < work.num_rows) head_product_of<Type, 1>(work, row);
}

void head_product(const HeadProductWork& work) {
  if (work.is_bfloat16) return head_product_typed<BFloat16>(work);
  head_product_typed<Float32>(work);
}

template <class Type>
void transposed_product_typed(const HeadProductWork& work) {
  uint32_t row = 0;
  for (; row + 4 <= work.num_rows; row += 4) transposed_product_of<Type, 4>(work, row);
  for (; row + 2 <= work.num_rows; row += 2) transposed_product_of<Type, 2>(work, row);
  if (row < work.num_rows) transposed_product_of<Type, 1>(work, row);
}

void transposed_head_product(const HeadProductWork& work) {
  if (work.is_bfloat16) return transposed_product_typed<BFloat16>(work);
  transposed_product_typed<Float32>(work);
}
