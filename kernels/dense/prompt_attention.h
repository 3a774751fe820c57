// Attention of consecutive tokens of one request, which share the keys and values that they read.
#pragma once

#include "kernels/dense/row_ops.h"

namespace moebius::dense {

// All rows are of the request requests[0]. Blocks with a running softmax (Dao et al. 2022, arXiv:2205.14135); a row's
// bits depend on no other row, nor on the threads.
void attend_prompt(DenseThreads& threads, const Attention& call);

}  // namespace moebius::dense
