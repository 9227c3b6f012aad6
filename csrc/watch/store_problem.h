// Why a store did not do what it was asked for.
#pragma once

#include <cstdint>
#include <string>

namespace fusedcomm {

struct StoreProblem {
  enum class Kind : uint8_t {
    kSilent,   // it has not answered yet, and may still
    kFailed,   // it threw
    kStopping  // it was not asked, since the engine ends
  };
  Kind kind = Kind::kFailed;
  std::string text;  // for people

  bool is_silence() const { return kind == Kind::kSilent; }
};

}  // namespace fusedcomm
