// The gradient dtypes that have a wire format, as torch names them.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>

#include "codec/slices.h"

namespace fusedcomm {

// Indexed by GradDtype.
inline constexpr at::ScalarType kGradDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

inline bool has_wire_format(at::ScalarType dtype) {
  return std::find(std::begin(kGradDtypes), std::end(kGradDtypes), dtype) != std::end(kGradDtypes);
}

// Throws TypeError for any other dtype.
inline GradDtype grad_dtype_of(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(has_wire_format(dtype), "fusedcomm: gradients must be float32, bfloat16 or float16, not ", dtype);
  return static_cast<GradDtype>(std::find(std::begin(kGradDtypes), std::end(kGradDtypes), dtype) - kGradDtypes);
}

}  // namespace fusedcomm
