// A rank of the scenes that run the CUDA path without a GPU, from DDP's hook to the launches of kernels. The hook, the
// synchronizer, the engine, CudaDevice and StreamTransport are the product's. The accelerator is simulated
// (sim_accelerator.h), and so are torch's tensors on it (sim_torch.cpp), the driver and its kernels (sim_kernels.h),
// the process group (sim_backend.h) and NCCL (sim_nccl.h). Ranks are threads. The backward pass writes gradients on a
// compute stream, and the optimizer reads them there after the wait for the bucket's future.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "devices/cuda_device.h"
#include "frontends/ddp/hook.h"
#include "sim_backend.h"
#include "sim_kernels.h"
#include "sim_training.h"
#include "transport/c10d_transport.h"

namespace cuda_scenes {

using namespace fusedcomm;

struct Setup {
  WireConfig config;  // its ranks_per_host determines which ranks share a host
  int world_size = 2;
  // Of several chunks, of one, small, and of one again.
  std::vector<std::vector<sim::Shape>> buckets = {
      {{5700}, {40, kExactWire}}, {{1500}}, {{700}}, {{64, kExactWire}, {3000}, {9}}};
  bool passes_float64 = false;  // whether one more bucket comes first, of float64
  bool are_apart = false;       // whether each gradient is a tensor of its own; otherwise they are DDP's buckets
  int num_synced = 0;           // the ranks, from 0 on, with forced synchronization
  sim::BackendOptions backend;
  std::shared_ptr<const Nccl> nccl = sim::nccl();
  bool owns_backend = false;  // whether the one among all ranks is the transport's own
  int64_t pause_ms = 0;       // of each collective within a host; one between hosts has half
};

// Gradients are small signed integers times a power of two, so every wire of these scenes has the exact mean.
inline double gradient(int rank, int step, size_t bucket, size_t i) {
  const int value = static_cast<int>((i * 7 + bucket * 5 + static_cast<size_t>(step) * 3) % 15) - 7;
  return value * (rank + 1) * 0.25;
}

class Rank {
 public:
  // Call it on the rank's thread.
  Rank(const Setup& setup, sim::Groups& groups, int rank)
      : setup_(setup), rank_(rank), device_(sim::device(rank)), on_device_(device_), model_(device_, shapes_of(setup)) {
    // Attaching may happen on another stream than training.
    const c10::StreamGuard on_side(c10::impl::VirtualGuardImpl(device_.type()).getNewStream(device_, 0));
    cuda_ = sim::cuda_device(device_, setup.config.ranks_per_host > 1, rank < setup.num_synced);
    cuda_->warm_up();
    const auto transport = make_transport(groups);
    hook_ = std::make_shared<Synchronizer>(std::make_shared<Engine>(setup.config, cuda_, transport), transport,
                                           model_.known, device_, /*wire_1d=*/0);
    switch_.set(hook_, nullptr);
    // The default one, the one of attaching, and the device's.
    const int num_streams = 2 + static_cast<int>(cuda_->streams().size());
    for (int stream = 0; stream < num_streams; ++stream) {
      sim::set_pause(rank, stream, stream == rank % num_streams ? 400 : 40);
    }
  }

  // Connects all ranks, as attaching does.
  void connect() {
    const auto stream_of = [this](Channel channel) { return cuda_->stream_of(role_of(channel)); };
    std::static_pointer_cast<StreamTransport>(hook_->transport())->warm_up(stream_of);
  }

  // Makes new gradients of a bucket.
  void allocate(size_t b) {
    gradients_.resize(num_buckets());
    gradients_[b].clear();
    int64_t numel = 0;
    for (const at::Tensor& parameter : model_.parameters[b]) {
      if (setup_.are_apart) gradients_[b].push_back(at::empty_like(parameter));
      numel += parameter.numel();
    }
    if (!setup_.are_apart) gradients_[b].push_back(at::empty({numel}, model_.parameters[b][0].options()));
  }

  // Makes them, and enqueues the backward pass that writes them.
  void fill(int step, size_t b) {
    allocate(b);
    size_t first = 0;
    for (const at::Tensor& gradients : gradients_[b]) {
      sim::backward(gradients, [=, rank = rank_](size_t i) { return gradient(rank, step, b, first + i); });
      first += static_cast<size_t>(gradients.numel());
    }
  }

  // The last bucket ends a pass.
  void hand_over(size_t b) {
    futures_.resize(num_buckets());
    next_ = (b + 1) % num_buckets();
    const std::vector<at::Tensor>& parameters = model_.parameters[b];
    const sim::CountCalls counts(true);
    if (setup_.are_apart) {
      const Bucket bucket(b, b + 1 == num_buckets(), parameters, std::make_shared<const Gradients>(gradients_[b]));
      futures_[b] = hook_->run(bucket);
      return;
    }
    std::vector<size_t> offsets, lengths;
    std::vector<c10::IntArrayRef> sizes;
    for (const at::Tensor& parameter : parameters) {
      offsets.push_back(offsets.empty() ? 0 : offsets.back() + lengths.back());
      lengths.push_back(static_cast<size_t>(parameter.numel()));
      sizes.push_back(parameter.sizes());
    }
    c10d::GradBucket bucket(b, num_buckets(), gradients_[b][0], offsets, lengths, sizes, parameters, std::nullopt);
    futures_[b] = switch_.run(bucket);
  }

  // Why a bucket cannot be handed over, or has failed; empty if neither.
  std::string error_of(size_t b) {
    try {
      hand_over(b);
      return futures_[b]->hasError() ? futures_[b]->tryRetrieveErrorMessage() : "";
    } catch (const std::exception& e) {
      return e.what();
    }
  }

  // The same of the next bucket, whose gradients no backward pass writes.
  std::string error_of_next() {
    allocate(next_);
    return error_of(next_);
  }

  // Enqueues a backward pass. Returns the index of the bucket that failed, after which none is handed over; the number
  // of buckets if none did.
  size_t backward(int step) {
    for (size_t b = 0; b < num_buckets(); ++b) {
      fill(step, b);
      error_ = error_of(b);
      if (!error_.empty()) return b;
    }
    return num_buckets();
  }

  // Enqueues the waits for the buckets of the pass, or only for the last, and the optimizer.
  void take_results(int step, bool waits_for_all = true) {
    if (!waits_for_all) futures_.back()->waitAndThrow();
    for (size_t b = 0; b < num_buckets(); ++b) {
      if (waits_for_all) futures_[b]->waitAndThrow();
      size_t first = 0;
      for (const at::Tensor& gradients : gradients_[b]) {
        sim::optimizer(gradients, [=, this](size_t i, double value) { check(value, step, b, first + i); });
        first += static_cast<size_t>(gradients.numel());
      }
    }
    abandon();
  }

  // A step that must not fail. The host does not wait for it.
  void train(int step, bool waits_for_all = true) {
    REQUIRE(backward(step) == num_buckets(), "step %d: %s", step, error_.c_str());
    take_results(step, waits_for_all);
  }

  // Drops the buckets without waiting for them, as after a backward pass that failed.
  void abandon() {
    gradients_.clear();
    futures_.clear();
  }
  // Drops all that detaching drops.
  void detach() {
    switch_.set(nullptr, nullptr);
    switch_.observer().unwatch();
    hook_ = nullptr;
    cuda_ = nullptr;
  }

  c10::Stream compute() const { return sim::current_stream(rank_); }
  void synchronize() const { sim::synchronize(compute(), /*counts=*/false); }
  const std::shared_ptr<Synchronizer>& shared_hook() const { return hook_; }
  Synchronizer& hook() const { return *hook_; }
  Engine& engine() const { return hook_->engine(); }
  CudaDevice& cuda() const { return *cuda_; }
  HookSwitch& hook_switch() { return switch_; }
  void observe() {
    switch_.observer().watch(cuda_, [] {}, /*times=*/true);
  }
  size_t num_buckets() const { return model_.parameters.size(); }
  const std::string& error() const { return error_; }

 private:
  static std::vector<std::vector<sim::Shape>> shapes_of(const Setup& setup) {
    std::vector<std::vector<sim::Shape>> shapes = setup.buckets;
    if (setup.passes_float64) shapes.insert(shapes.begin(), {{500, 0, at::kDouble}, {20, 0, at::kDouble}});
    return shapes;
  }

  // Ranks are on hosts in order: the first `ranks_per_host` are on the first one.
  std::shared_ptr<C10dTransport> make_transport(sim::Groups& groups) {
    const int64_t on_host = setup_.config.ranks_per_host;
    const auto backend = [&](const std::string& name, int64_t rank, int64_t size, int64_t pause_ms) {
      sim::BackendOptions options = setup_.backend;
      options.pause_ms = pause_ms;
      return sim::make_backend(groups.get(name, size), static_cast<int>(rank), static_cast<int>(size), options);
    };
    const auto transport =
        std::make_shared<StreamTransport>(backend("all", rank_, setup_.world_size, 0), device_, setup_.nccl);
    if (setup_.owns_backend) transport->own_backend();
    if (on_host == 1) return transport;
    const Place place{rank_ % on_host, on_host, rank_ / on_host, setup_.world_size / on_host};
    const std::string host = std::to_string(place.host);
    const auto scatter = backend("local scatter " + host, place.local_rank, on_host, setup_.pause_ms);
    const auto cross =
        backend("cross " + std::to_string(place.local_rank), place.host, place.num_hosts, setup_.pause_ms / 2);
    const auto gather = backend("local gather " + host, place.local_rank, on_host, setup_.pause_ms);
    return transport->with_hosts(place, {scatter, gather, cross, cross});
  }

  // Called on a stream's thread.
  void check(double value, int step, size_t b, size_t i) const {
    double mean = 0;
    for (int rank = 0; rank < setup_.world_size; ++rank) mean += gradient(rank, step, b, i) / setup_.world_size;
    REQUIRE(std::fabs(value - mean) <= 1e-6, "rank %d: step %d bucket %zu element %zu: %g, not %g", rank_, step, b, i,
            value, mean);
  }

  const Setup setup_;
  const int rank_;
  const c10::Device device_;
  const c10::DeviceGuard on_device_;
  const sim::Model model_;
  std::shared_ptr<CudaDevice> cuda_;
  std::shared_ptr<Synchronizer> hook_;
  HookSwitch switch_{nullptr};
  std::vector<std::vector<at::Tensor>> gradients_;  // of this pass, by bucket
  std::vector<FuturePtr> futures_;                  // the same
  std::string error_;                               // of the pass's last bucket that was handed over
  size_t next_ = 0;                                 // the bucket that is to be handed over
};

// Calls body(rank, index) on a thread for each rank. When it returns, all enqueued work has ended, unless rank 0's
// device `is_faulted`.
inline void with_ranks(const Setup& setup, const std::function<void(Rank&, int)>& body, bool is_faulted = false) {
  sim::Groups groups;
  std::vector<int> indices(static_cast<size_t>(setup.world_size));
  std::iota(indices.begin(), indices.end(), 0);
  sim::on_threads(indices, [&](int index) {
    Rank rank(setup, groups, index);
    body(rank, index);
    if (index != 0 || !is_faulted) sim::finish(index);
  });
  sim::reset();
}

inline WireConfig wire_config(Wire wire, Sum sum, int64_t ranks_per_host = 1, int64_t num_slots = 2) {
  WireConfig config;
  config.ranks_per_host = ranks_per_host;
  config.wire = wire;
  config.sum = sum;
  config.max_chunk_nbytes = 4096;
  config.num_slots = num_slots;
  return config;
}

inline Setup setup_of(const WireConfig& config) {
  Setup setup;
  setup.config = config;
  setup.world_size = 2 * static_cast<int>(config.ranks_per_host);
  return setup;
}

// One of each kind of sum.
inline std::vector<Setup> sums() {
  return {setup_of(wire_config(Wire::kBf16, Sum::kTwoShot)), setup_of(wire_config(Wire::kBf16, Sum::kOneShot)),
          setup_of(wire_config(Wire::kFp32, Sum::kExact)), setup_of(wire_config(Wire::kBf16, Sum::kTwoShot, 2))};
}

}  // namespace cuda_scenes
