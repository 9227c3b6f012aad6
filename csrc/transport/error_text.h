// The text of an error as users read it: without a backtrace.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace fusedcomm {

inline std::string error_text(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  return known ? known->what_without_backtrace() : error.what();
}

// The same for an error that is not null.
inline std::string error_text(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return error_text(known);
  }
}

}  // namespace fusedcomm
