#include "frontends/horovod/plain_collectives.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

namespace fusedcomm::horovod {
namespace {

// The dtype in which values are summed. 16-bit floats are summed in fp32, and gloo knows no int16.
at::ScalarType sum_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
    case at::kBFloat16:
      return at::kFloat;
    case at::kShort:
      return at::kInt;
    case at::kBool:
      return at::kByte;
    default:
      return dtype;
  }
}

c10d::ReduceOp reduce_op(Op op) {
  switch (op) {
    case Op::kMin:
      return c10d::ReduceOp::MIN;
    case Op::kMax:
      return c10d::ReduceOp::MAX;
    case Op::kProduct:
      return c10d::ReduceOp::PRODUCT;
    default:
      return c10d::ReduceOp::SUM;
  }
}

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
void finish_scale(const at::Tensor& tensor, const Signature& as, int64_t size) {
  if (as.op != Op::kAverage) return multiply(tensor, as.postscale);
  if (as.postscale != 1 || at::isIntegralType(tensor.scalar_type(), true)) {
    return multiply(tensor, as.postscale / static_cast<double>(size));
  }
  tensor.div_(static_cast<double>(size));
}

// `tensor` is contiguous. A dimension of size 1 may have any stride, which view() would keep.
at::Tensor flat(const at::Tensor& tensor) { return tensor.as_strided({tensor.numel()}, {1}); }
at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? at::empty({0}, tensor.options().dtype(at::kByte)) : flat(tensor).view(at::kByte);
}

int64_t row_numel(const at::Tensor& tensor) {
  int64_t numel = 1;
  for (int64_t i = 1; i < tensor.dim(); ++i) numel *= tensor.size(i);
  return numel;
}

std::vector<int64_t> with_rows(const at::Tensor& tensor, int64_t rows) {
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape.at(0) = rows;
  return shape;
}

}  // namespace

// The collectives of one call: finishes when all have ended.
class PlainCollectives::Works {
 public:
  explicit Works(Finish finish) : state_(std::make_shared<State>()) { state_->finish = std::move(finish); }
  ~Works() { State::end_one(state_); }
  Works(const Works&) = delete;
  Works& operator=(const Works&) = delete;

  // Writes results, and returns new tensors if there are some.
  using Write = std::function<std::vector<at::Tensor>()>;
  // `write` is called after all collectives, in the order of these calls.
  void then(Write write) { state_->writes.push_back(std::move(write)); }
  // start: returns the collective's Work.
  template <typename Start>
  void add(const Start& start) {
    ++state_->num_left;
    try {
      const c10::intrusive_ptr<c10d::Work> work = start();
      state_->works.push_back(work);
      work->getFuture()->addCallback([state = state_](c10::ivalue::Future& future) {
        if (future.hasError()) state->fail(future.exception_ptr());
        State::end_one(state);
      });
    } catch (...) {
      state_->fail(std::current_exception());
      State::end_one(state_);
    }
  }

 private:
  struct State {
    Finish finish;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<Write> writes;
    std::atomic<int> num_left{1};  // one for the call itself
    std::mutex mutex;
    std::exception_ptr error;

    void fail(std::exception_ptr why) {
      std::lock_guard<std::mutex> lock(mutex);
      if (!error) error = std::move(why);
    }
    std::vector<at::Tensor> write_all() const {
      const at::NoGradGuard no_grad;
      // On an accelerator a result is still being copied there, on a stream of the backend's.
      for (const auto& work : works) work->synchronize();
      std::vector<at::Tensor> made;
      for (const Write& write : writes) {
        for (at::Tensor& tensor : write()) made.push_back(std::move(tensor));
      }
      return made;
    }
    static void end_one(const std::shared_ptr<State>& state) {
      if (--state->num_left != 0) return;
      std::vector<at::Tensor> made;
      if (!state->error) {
        try {
          made = state->write_all();
        } catch (...) {
          state->error = std::current_exception();
        }
      }
      state->finish(state->error, std::move(made));
    }
  };
  const std::shared_ptr<State> state_;
};

at::Tensor neutral(const TensorMeta& meta, Op op) {
  const auto dtype = static_cast<at::ScalarType>(meta.dtype);
  const at::Tensor tensor = at::zeros(meta.shape, at::TensorOptions().dtype(dtype));
  if (op == Op::kProduct) tensor.fill_(1);
  if (op != Op::kMin && op != Op::kMax) return tensor;
  const bool is_min = op == Op::kMin;
  if (at::isFloatingType(dtype)) {
    const double inf = std::numeric_limits<double>::infinity();
    return tensor.fill_(is_min ? inf : -inf);
  }
  AT_DISPATCH_INTEGRAL_TYPES_AND(at::kBool, dtype, "neutral", [&] {
    using Limits = std::numeric_limits<scalar_t>;
    tensor.fill_(is_min ? Limits::max() : Limits::lowest());
  });
  return tensor;
}

void PlainCollectives::allreduce(const Signature& as, const std::vector<at::Tensor>& inputs,
                                 const std::vector<at::Tensor>& outputs, Finish finish) {
  const at::NoGradGuard no_grad;
  Works works(std::move(finish));
  std::vector<bool> is_done(inputs.size());
  for (size_t first = 0; first < inputs.size(); ++first) {
    if (is_done[first]) continue;
    std::vector<at::Tensor> from, to;
    for (size_t i = first; i < inputs.size(); ++i) {
      if (inputs[i].scalar_type() != inputs[first].scalar_type()) continue;
      is_done[i] = true;
      from.push_back(inputs[i]);
      to.push_back(outputs[i]);
    }
    reduce_run(as, from, to, works);
  }
}

void PlainCollectives::reduce_run(const Signature& as, const std::vector<at::Tensor>& inputs,
                                  const std::vector<at::Tensor>& outputs, Works& works) {
  const at::Tensor& front = inputs.front();
  const at::ScalarType dtype = sum_dtype(front.scalar_type());
  int64_t numel = 0;
  for (const at::Tensor& input : inputs) numel += input.numel();
  if (numel == 0) return;
  const bool is_in_place = inputs.size() == 1 && dtype == front.scalar_type();
  at::Tensor buffer;
  if (is_in_place) {
    if (!front.is_alias_of(outputs.front())) outputs.front().copy_(front);
    buffer = flat(outputs.front());
  } else {
    buffer = at::empty({numel}, front.options().dtype(dtype));
    int64_t at = 0;
    for (const at::Tensor& input : inputs) {
      buffer.narrow(0, at, input.numel()).copy_(flat(input));
      at += input.numel();
    }
  }
  multiply(buffer, as.prescale);
  if (size() > 1) {
    works.add([&] {
      std::vector<at::Tensor> tensors = {buffer};
      c10d::AllreduceOptions options;
      options.reduceOp = reduce_op(as.op);
      return backend_->allreduce(tensors, options);
    });
  }
  works.then([buffer, as, outputs, is_in_place, size = size()]() -> std::vector<at::Tensor> {
    finish_scale(buffer, as, size);
    int64_t at = 0;
    for (const at::Tensor& output : outputs) {
      if (!is_in_place) flat(output).copy_(buffer.narrow(0, at, output.numel()));
      at += output.numel();
    }
    return {};
  });
}

void PlainCollectives::allgather(const std::vector<at::Tensor>& inputs, const std::vector<std::vector<int64_t>>& rows,
                                 Finish finish) {
  const at::NoGradGuard no_grad;
  Works works(std::move(finish));
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& input = inputs[i];
    std::vector<int64_t> of_members;
    for (const auto& of_member : rows) of_members.push_back(of_member.at(i));
    int64_t most = 0, sum = 0;
    for (const int64_t count : of_members) {
      most = std::max(most, count);
      sum += count;
    }
    const bool is_even = most * size() == sum;
    const int64_t numel = row_numel(input);
    // A backend gathers equal parts: shorter ones are filled up, and cut off again.
    at::Tensor all = at::empty(with_rows(input, most * size()), input.options());
    at::Tensor part = input;
    if (!is_even) {
      part = at::empty(with_rows(input, most), input.options());
      part.narrow(0, 0, input.size(0)).copy_(input);
    }
    if (most * numel != 0) {
      if (size() == 1) {
        all.copy_(part);
      } else {
        works.add([&] {
          at::Tensor to = bytes_of(all), from = bytes_of(part);
          return backend_->_allgather_base(to, from);
        });
      }
    }
    works.then([all, of_members, most, is_even]() -> std::vector<at::Tensor> {
      if (is_even) return {all};
      std::vector<at::Tensor> parts;
      for (size_t j = 0; j < of_members.size(); ++j) {
        parts.push_back(all.narrow(0, static_cast<int64_t>(j) * most, of_members[j]));
      }
      return {at::cat(parts)};
    });
  }
}

void PlainCollectives::broadcast(int root, const std::vector<at::Tensor>& inputs,
                                 const std::vector<at::Tensor>& outputs, Finish finish) {
  const at::NoGradGuard no_grad;
  Works works(std::move(finish));
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& output = outputs[i];
    if (rank() == root && !inputs[i].is_alias_of(output)) output.copy_(inputs[i]);
    if (size() == 1 || output.numel() == 0) continue;
    works.add([&] {
      std::vector<at::Tensor> tensors = {bytes_of(output)};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      options.rootTensor = 0;
      return backend_->broadcast(tensors, options);
    });
  }
}

void PlainCollectives::alltoall(const at::Tensor& input, const std::vector<std::vector<int64_t>>& rows, Finish finish) {
  const at::NoGradGuard no_grad;
  Works works(std::move(finish));
  const auto own = static_cast<size_t>(rank());
  const int64_t row_nbytes = row_numel(input) * static_cast<int64_t>(input.element_size());
  std::vector<int64_t> send, receive;
  int64_t num_rows = 0, total = 0;
  for (size_t j = 0; j < rows.size(); ++j) {
    send.push_back(rows[own].at(j) * row_nbytes);
    receive.push_back(rows[j].at(own) * row_nbytes);
    num_rows += rows[j].at(own);
    for (const int64_t count : rows[j]) total += count;
  }
  at::Tensor output = at::empty(with_rows(input, num_rows), input.options());
  if (size() == 1) {
    output.copy_(input.narrow(0, 0, num_rows));
  } else if (total * row_nbytes != 0) {
    works.add([&] {
      at::Tensor to = bytes_of(output), from = bytes_of(input);
      return backend_->alltoall_base(to, from, receive, send);
    });
  }
  works.then([output]() -> std::vector<at::Tensor> { return {output}; });
}

void PlainCollectives::reducescatter(const Signature& as, const std::vector<at::Tensor>& inputs, Finish finish) {
  const at::NoGradGuard no_grad;
  Works works(std::move(finish));
  const int64_t n = size();
  for (const at::Tensor& input : inputs) {
    const int64_t numel = row_numel(input);
    at::Tensor from = flat(input);
    if (as.prescale != 1) {
      from = from.clone();
      multiply(from, as.prescale);
    }
    const int64_t each = input.size(0) / n, more = input.size(0) % n;
    std::vector<int64_t> send;
    for (int64_t j = 0; j < n; ++j) {
      send.push_back((each + (j < more)) * numel * static_cast<int64_t>(input.element_size()));
    }
    const int64_t rows = each + (rank() < more);
    at::Tensor parts = at::empty({n, rows * numel}, input.options());
    if (n == 1) {
      parts.copy_(from.view({1, -1}));
    } else if (input.numel() != 0) {
      works.add([&] {
        std::vector<int64_t> receive(static_cast<size_t>(n), send[static_cast<size_t>(rank())]);
        at::Tensor to = bytes_of(parts), bytes = bytes_of(from);
        return backend_->alltoall_base(to, bytes, receive, send);
      });
    }
    works.then([parts, as, shape = with_rows(input, rows), n]() -> std::vector<at::Tensor> {
      const at::ScalarType dtype = parts.scalar_type();
      at::Tensor sum = parts[0].to(sum_dtype(dtype), false, true);
      for (int64_t j = 1; j < n; ++j) sum.add_(parts[j]);
      finish_scale(sum, as, n);
      return {sum.to(dtype).view(shape)};
    });
  }
}

void PlainCollectives::abandon() {
  new BackendPtr(backend_);  // never freed
}

}  // namespace fusedcomm::horovod
