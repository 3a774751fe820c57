// A dense layer's weight [out, in] in packed panels, kept as its checkpoint stores it, and what is computed with it.
//
// A fused projection has parts, each a stored matrix in a format of its own whose columns follow those of the part
// before. Products are those of an expert's GEMMs (gemm.h): exact in float32 for rows in float32, for rows in bfloat16
// as the kernel plan chooses; sums in float32, rounded once to the output's type.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/dense/dense_threads.h"
#include "kernels/format/source_matrix.h"
#include "kernels/moe/expert_backend.h"
#include "kernels/moe/row_buffer.h"

namespace moebius::dense {

// A part as its caller describes it.
struct PartShape {
  WeightFormat format;
  uint32_t rows;  // output features
};

// Rows to multiply, and where the products go; the caller owns all memory.
struct Product {
  const void* rows;      // [num_rows][row_stride], in_features columns read
  size_t row_stride;     // elements
  uint32_t num_rows;
  DType row_type;        // kFloat32 or kBFloat16
  void* output;          // [num_rows][output_stride], out_features columns written
  size_t output_stride;  // elements
  DType output_type;     // kFloat32 or kBFloat16
  const float* bias;     // [out_features]; null: none
};

class DenseMatrix {
 public:
  // memory: of the caller, 64-byte aligned, the parts' panels one after the other; it outlives the matrix. Throws
  // std::invalid_argument when it does not fit, or a format has no kernel or needs rows in another type or order.
  DenseMatrix(std::shared_ptr<DenseThreads> threads, uint32_t in_features, const std::vector<PartShape>& parts,
              std::byte* memory, size_t memory_bytes);

  // Packs rows of a part from `first_row` on, a multiple of 16. Thread safe for different rows. Throws
  // std::invalid_argument when the source does not fit or would be rounded.
  void pack(uint32_t part, uint32_t first_row, const SourceMatrix& source);
  // Chooses the kernels of bfloat16 rows by measuring, once all is packed.
  void calibrate();

  void multiply(const Product& product);
  // target[i] = row ids[i] of the weight, dequantised, [count][in_features]; ids out of range give zeros.
  void take_rows(const int64_t* ids, uint32_t count, void* target, DType target_type);

  uint32_t in_features() const { return in_features_; }
  uint32_t out_features() const { return out_features_; }
  DenseThreads& threads() { return *threads_; }

 private:
  struct Part {
    LayoutPlan* plan;
    uint32_t begin;  // first column of the product
    uint32_t rows;
    uint32_t panels;
    size_t input;  // index into inputs_ of the rows that it reads
    std::byte* packed;
  };
  // What the parts of one layout read: rows converted to the kernel's type and prepared.
  struct Input {
    LayoutPlan* plan;
    const GemmKernel* kernel = nullptr;
    std::vector<const void*> pointers{};  // [rows]
    size_t stride = 0;
    AlignedBuffer prepared{};
  };
  struct Task {
    uint32_t part;
    uint32_t panel;
    uint32_t num_panels;
  };

  void choose_kernels(const Product& product);
  const std::byte* convert_rows(const Product& product, RowType type, size_t& stride);
  void prepare_rows(const Product& product);
  void cut(const Product& product);
  void run(const Task& task, const Product& product, uint32_t worker);
  void store(const Task& task, const Product& product, uint32_t first_row, const GemmWork& work) const;
  void take_row(int64_t id, float* target) const;

  std::shared_ptr<DenseThreads> threads_;
  uint32_t in_features_;
  uint32_t out_features_ = 0;
  std::vector<Part> parts_;
  std::vector<Input> inputs_;
  AlignedBuffer converted_[2];  // rows by RowType
  std::vector<Task> tasks_;
};

}  // namespace moebius::dense
