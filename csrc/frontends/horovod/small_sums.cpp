#include "frontends/horovod/small_sums.h"

#include <cstring>

namespace fusedcomm::horovod {
namespace {

// The dtype in which values are summed: 16-bit floats are summed in fp32.
at::ScalarType sum_dtype(at::ScalarType dtype) { return at::isReducedFloatingType(dtype) ? at::kFloat : dtype; }

// Integers are multiplied in fp64 and truncated, 16-bit floats in fp32: mul_(double) would round the factor to 16 bits.
void multiply(const at::Tensor& tensor, double factor) {
  if (factor == 1) return;
  if (at::isIntegralType(tensor.scalar_type(), true)) {
    tensor.copy_(tensor.to(at::kDouble).mul_(factor).trunc_());
  } else if (at::isReducedFloatingType(tensor.scalar_type())) {
    tensor.copy_(tensor.to(at::kFloat).mul_(factor));
  } else {
    tensor.mul_(factor);
  }
}

// Multiplies by postscale, and divides by `size` for a mean.
void finish_scale(const at::Tensor& tensor, const Reduction& as, int64_t size) {
  if (as.op != Op::kAverage) return multiply(tensor, as.postscale);
  if (as.postscale != 1 || at::isIntegralType(tensor.scalar_type(), true)) {
    return multiply(tensor, as.postscale / static_cast<double>(size));
  }
  tensor.div_(static_cast<double>(size));
}

// `tensor` is contiguous. A dimension of size 1 may have any stride, which view() would keep.
at::Tensor flat(const at::Tensor& tensor) { return tensor.as_strided({tensor.numel()}, {1}); }

// One after another, in the dtype in which they are summed.
at::Tensor concatenated(const std::vector<at::Tensor>& tensors) {
  const at::Tensor& front = tensors.front();
  int64_t numel = 0, at = 0;
  for (const at::Tensor& tensor : tensors) numel += tensor.numel();
  at::Tensor all = at::empty({numel}, front.options().dtype(sum_dtype(front.scalar_type())));
  for (const at::Tensor& tensor : tensors) {
    all.narrow(0, at, tensor.numel()).copy_(flat(tensor));
    at += tensor.numel();
  }
  return all;
}

// A tensor of one dimension as text: its dtype, and its memory.
std::string text_of(const at::Tensor& tensor) {
  std::string text(1, static_cast<char>(tensor.scalar_type()));
  return text.append(static_cast<const char*>(tensor.data_ptr()), tensor.nbytes());
}

at::Tensor tensor_of(const std::string& text) {
  const auto dtype = static_cast<at::ScalarType>(text.front());
  const auto numel = static_cast<int64_t>((text.size() - 1) / c10::elementSize(dtype));
  const at::Tensor tensor = at::empty({numel}, at::TensorOptions().dtype(dtype));
  std::memcpy(tensor.data_ptr(), text.data() + 1, text.size() - 1);
  return tensor;
}

}  // namespace

std::string small_part(const Reduction& as, const std::vector<at::Tensor>& inputs) {
  const at::NoGradGuard no_grad;
  const at::Tensor all = concatenated(inputs);
  multiply(all, as.prescale);
  return text_of(all);
}

std::string small_sum(const Reduction& as, const std::vector<std::string>& parts) {
  const at::NoGradGuard no_grad;
  at::Tensor sum;
  for (const std::string& part : parts) {
    if (part.empty()) continue;
    const at::Tensor next = tensor_of(part);
    if (!sum.defined()) {
      sum = next;
    } else if (as.op == Op::kMin || as.op == Op::kMax) {
      sum = as.op == Op::kMin ? at::minimum(sum, next) : at::maximum(sum, next);
    } else {
      as.op == Op::kProduct ? sum.mul_(next) : sum.add_(next);
    }
  }
  return text_of(sum);
}

void write_small(const Reduction& as, const std::string& sum, int64_t size, const std::vector<at::Tensor>& outputs) {
  const at::NoGradGuard no_grad;
  const at::Tensor all = tensor_of(sum);
  finish_scale(all, as, size);
  int64_t at = 0;
  for (const at::Tensor& output : outputs) {
    flat(output).copy_(all.narrow(0, at, output.numel()));
    at += output.numel();
  }
}

}  // namespace fusedcomm::horovod
