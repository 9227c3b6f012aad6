// Why a request to the store did not succeed.
#pragma once

#include <cstdint>
#include <string>

namespace fusedcomm {

struct StoreProblem {
  enum class Kind : uint8_t {
    kSilent,   // the store has not answered yet, but still may
    kFailed,   // the store threw
    kStopping  // the request was not made, because the engine is stopping
  };
  Kind kind = Kind::kFailed;
  std::string text;  // for people

  bool is_silence() const { return kind == Kind::kSilent; }
};

}  // namespace fusedcomm
