// The gradient dtypes that have a wire format, as torch names them.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "codec/codec.h"

namespace fusedcomm {

inline bool has_wire_format(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

// Throws TypeError for any other dtype.
inline GradDtype grad_dtype_of(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(has_wire_format(dtype), "fusedcomm: gradients must be float32, bfloat16 or float16, not ", dtype);
  return dtype == at::kFloat ? GradDtype::kFloat32 : dtype == at::kHalf ? GradDtype::kFloat16 : GradDtype::kBFloat16;
}

}  // namespace fusedcomm
