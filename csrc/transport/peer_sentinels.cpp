#include "transport/peer_sentinels.h"

#include <cstddef>
#include <memory>

#include "transport/end_soon.h"

namespace fusedcomm {

PeerSentinels::PeerSentinels(BackendPtr backend, int tag) : backend_(std::move(backend)) {
  for (int peer = 0; peer < backend_->getSize(); ++peer) {
    if (peer == backend_->getRank()) continue;
    const auto byte = std::make_shared<std::byte>();
    std::vector<at::Tensor> bytes = {as_tensor({byte.get(), 1, byte}, at::kByte)};
    Sentinel sentinel{peer, nullptr, nullptr};
    try {
      sentinel.work = backend_->recv(bytes, peer, tag);
    } catch (...) {
      sentinel.error = std::current_exception();
    }
    sentinels_.push_back(std::move(sentinel));
  }
}

PeerSentinels::~PeerSentinels() {
  sentinels_.clear();
  end_soon([backend = std::move(backend_)]() mutable { backend.reset(); });
}

std::vector<std::pair<int, std::exception_ptr>> PeerSentinels::look() {
  std::vector<std::pair<int, std::exception_ptr>> lost;
  for (Sentinel& sentinel : sentinels_) {
    if (sentinel.ended) continue;
    try {
      if (sentinel.error) std::rethrow_exception(sentinel.error);
      sentinel.work->abort();
      sentinel.work->wait();  // returns at once; throws if the connection has ended
    } catch (...) {
      sentinel.ended = true;
      lost.emplace_back(sentinel.peer, std::current_exception());
    }
  }
  return lost;
}

}  // namespace fusedcomm
