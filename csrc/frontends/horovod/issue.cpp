// How a coordinator follows rank 0's calls and issues collectives.
#include <algorithm>
#include <utility>

#include "frontends/horovod/coordinator.h"
#include "gradients/grad_dtype.h"
#include "transport/error_text.h"

namespace fusedcomm::horovod {
namespace {

// How long a collective that has failed waits for rank 0's word about who is lost.
constexpr std::chrono::seconds kExplanationTimeout{3};

// Whether the engine carries the collective. One sum has one dtype.
bool goes_in_wire(const Signature& as) {
  if (as.wire.empty() || (as.op != Op::kSum && as.op != Op::kAverage)) return false;
  return std::all_of(as.tensors.begin(), as.tensors.end(), [&as](const TensorMeta& tensor) {
    return tensor.dtype == as.tensors.front().dtype && has_wire_format(static_cast<at::ScalarType>(tensor.dtype));
  });
}

}  // namespace

void Coordinator::report() {
  for (auto& [number, set] : sets_) {
    if (set.unreported.empty()) continue;
    Ready ready;
    ready.set = number;
    for (const RequestPtr& request : std::exchange(set.unreported, {})) {
      Ready::Entry entry;
      const auto id = set.ids.find(request->key);
      if (id != set.ids.end() && signatures_.at(id->second) == request->signature) {
        entry.id = id->second;
      } else {
        entry.signature = request->signature;
      }
      ready.entries.push_back(std::move(entry));
    }
    outbox_.push_back(ready.message());
  }
}

void Coordinator::execute(const Execute& execute) {
  for (IssuedBucket& bucket : buckets_of(execute)) issue(std::move(bucket));
}

std::vector<IssuedBucket> Coordinator::buckets_of(const Execute& execute) {
  std::vector<IssuedBucket> buckets;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sets_.find(execute.set);
  if (found == sets_.end()) return buckets;
  Set& set = found->second;
  if (keeps_events_ && marks_cycles_) {
    const auto now = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - began_).count();
    events_.push_back({"", "CYCLE_START", now, now});
  }
  for (const Response& response : execute.responses) {
    IssuedBucket bucket;
    bucket.set = execute.set;
    for (const Response::Entry& entry : response.entries) {
      if (entry.is_new && entry.id != kNoId) {
        signatures_[entry.id] = entry.signature;
        set.ids[entry.signature.key()] = entry.id;
      }
      const Signature& signature = entry.is_new ? entry.signature : signatures_.at(entry.id);
      const auto own = set.requests.find(signature.key());
      RequestPtr request;
      if (own != set.requests.end() && !own->second->is_issued) {
        request = own->second;
      } else if (response.error.empty()) {
        request = zero_request(execute.set, signature);
      } else {
        continue;
      }
      request->result.error = response.error;
      request->result.number = response.number;
      request->is_issued = true;
      bucket.requests.push_back(std::move(request));
      bucket.entries.push_back(entry);
    }
    if (bucket.requests.empty()) continue;
    ++set.num_under_way;
    buckets.push_back(std::move(bucket));
  }
  return buckets;
}

// A rank that has joined sends what does not change the others' result.
RequestPtr Coordinator::zero_request(int set, const Signature& signature) const {
  auto request = std::make_shared<Request>();
  request->signature = signature;
  request->key = signature.key();
  request->set = set;
  if (signature.kind == Kind::kBarrier || signature.kind == Kind::kJoin) return request;
  for (const TensorMeta& tensor : signature.tensors) {
    request->inputs.push_back(neutral(tensor, signature.op));
    request->outputs.push_back(request->inputs.back());
  }
  return request;
}

void Coordinator::issue(IssuedBucket taken) {
  const auto bucket = std::make_shared<IssuedBucket>(std::move(taken));
  const Request& front = *bucket->requests.front();
  std::shared_ptr<PlainCollectives> plain;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = sets_.find(bucket->set);
    if (found != sets_.end()) plain = found->second.plain;
    for (const RequestPtr& request : bucket->requests) request->issued = Clock::now();
  }
  const Kind kind = front.signature.kind;
  if (!front.result.error.empty() || !plain || kind == Kind::kBarrier || kind == Kind::kJoin) {
    return ended(*bucket, nullptr, {});
  }
  try {
    for (const RequestPtr& request : bucket->requests) wait_for(request->enqueued, request->inputs);
    goes_in_wire(front.signature) && plain->size() > 1 ? issue_in_wire(bucket, *plain) : issue_plain(bucket, *plain);
  } catch (...) {
    ended(*bucket, std::current_exception(), {});
  }
}

void Coordinator::issue_plain(const std::shared_ptr<IssuedBucket>& bucket, PlainCollectives& plain) {
  std::vector<at::Tensor> inputs, outputs;
  for (const RequestPtr& request : bucket->requests) {
    inputs.insert(inputs.end(), request->inputs.begin(), request->inputs.end());
    outputs.insert(outputs.end(), request->outputs.begin(), request->outputs.end());
  }
  Finish finish = [this, bucket](std::exception_ptr error, std::vector<at::Tensor> made) {
    ended(*bucket, std::move(error), std::move(made));
  };
  const Signature& as = bucket->requests.front()->signature;
  const auto& of_members = bucket->entries.front().of_members;
  switch (as.kind) {
    case Kind::kAllgather:
      return plain.allgather(inputs, of_members, std::move(finish));
    case Kind::kBroadcast:
      return plain.broadcast(as.root, inputs, outputs, std::move(finish));
    case Kind::kAlltoall: {
      auto& received = bucket->requests.front()->result.received_splits;
      received.emplace_back();
      for (const auto& rows : of_members) received.back().push_back(rows.at(static_cast<size_t>(plain.rank())));
      return plain.alltoall(inputs.front(), of_members, std::move(finish));
    }
    case Kind::kReducescatter:
      return plain.reducescatter(as, inputs, std::move(finish));
    default:
      return plain.allreduce(as, inputs, outputs, std::move(finish));
  }
}

void Coordinator::issue_in_wire(const std::shared_ptr<IssuedBucket>& bucket, PlainCollectives& plain) {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  const at::NoGradGuard no_grad;
  for (const RequestPtr& request : bucket->requests) {
    for (size_t i = 0; i < request->inputs.size(); ++i) {
      if (request->inputs[i].numel() == 0) continue;
      names.push_back(request->signature.tensor_name(i));
      tensors.push_back(request->outputs[i]);
      if (!request->inputs[i].is_alias_of(request->outputs[i])) request->outputs[i].copy_(request->inputs[i]);
    }
  }
  if (tensors.empty()) return ended(*bucket, nullptr, {});
  const Signature& as = bucket->requests.front()->signature;
  const double factor = as.prescale * as.postscale * (as.op == Op::kAverage ? 1.0 : plain.size());
  wire_sums(bucket->set, as.wire)->run(names, tensors, factor, [this, bucket](std::exception_ptr error) {
    ended(*bucket, std::move(error), {});
  });
}

std::shared_ptr<FusedSum> Coordinator::wire_sums(int set, const std::string& wire) {
  std::shared_ptr<FusedSum>& sums = wires_[{set, wire}];
  if (!sums) sums = open_wire_(set, wire);
  return sums;
}

void Coordinator::ended(const IssuedBucket& bucket, std::exception_ptr error, std::vector<at::Tensor> made) {
  std::unique_lock<std::mutex> lock(mutex_);
  // A backend says that a connection has ended, but not whose. The coordinator's own thread is the one that will know.
  if (error && std::this_thread::get_id() != thread_.get_id()) {
    changed_.wait_for(lock, kExplanationTimeout, [this] { return !failure_.empty(); });
  }
  lock.unlock();
  std::string text = bucket.requests.front()->result.error;
  try {
    if (error) std::rethrow_exception(error);
    for (const RequestPtr& request : bucket.requests) {
      if (const auto written = enqueued(request->inputs)) written->synchronize();
    }
  } catch (...) {
    text = "fusedcomm: " + bucket.requests.front()->key + " failed on rank " + std::to_string(options_.rank) + ": " +
           error_text(std::current_exception());
    lock.lock();
    if (!failure_.empty()) text = failure_ + " (" + text + ")";
    // The other ranks wait for this one.
    outbox_.push_back(text_message(MessageType::kLeaving, text));
    links_.wake();
    lock.unlock();
  }
  finish(bucket, text, std::move(made));
}

void Coordinator::finish(const IssuedBucket& bucket, const std::string& error, std::vector<at::Tensor> made) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sets_.find(bucket.set);
  if (found != sets_.end()) --found->second.num_under_way;
  size_t next = 0;
  for (const RequestPtr& request : bucket.requests) {
    const size_t count = made.empty() ? 0 : request->inputs.size();
    request->result.outputs = request->outputs;
    for (size_t i = 0; i < count; ++i) request->result.outputs.push_back(made[next++]);
    if (!error.empty()) request->result.error = error;
    // wait() may have given the request up after a failure.
    request->is_done = true;
    request->inputs.clear();
    if (found != sets_.end()) {
      const auto own = found->second.requests.find(request->key);
      if (own != found->second.requests.end() && own->second == request) found->second.requests.erase(own);
    }
    if (keeps_events_) note(*request);
  }
  // Requests that became ready meanwhile may go now.
  if (negotiator_) links_.wake();
  changed_.notify_all();
}

void Coordinator::note(const Request& request) {
  if (request.handle < 0) return;
  const auto us = [this](Clock::time_point when) {
    return std::chrono::duration_cast<std::chrono::microseconds>(when - began_).count();
  };
  std::string phase = kind_name(request.signature.kind);
  std::transform(phase.begin(), phase.end(), phase.begin(), [](char c) { return static_cast<char>(std::toupper(c)); });
  events_.push_back({request.key, "NEGOTIATE_" + phase, us(request.submitted), us(request.issued)});
  events_.push_back({request.key, phase, us(request.issued), us(Clock::now())});
}

}  // namespace fusedcomm::horovod
