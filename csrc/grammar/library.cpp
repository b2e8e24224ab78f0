#include "grammar/library.h"

#include <support/logging.h>

#include "grammar/work_meter.h"

// The library asks for these with XGRAMMAR_LOG_CUSTOMIZE. It warns of every token that it refuses,
// and a refused draft is nothing to warn of.
namespace xgrammar {

void LogFatalImpl(const std::string& file, int line, const std::string& message) {
  throw LogFatalError(file, line, message);
}

void LogMessageImpl(const std::string&, int, int, const std::string&) {}

}  // namespace xgrammar

namespace openspec::library {

namespace {

/// "Check failed: (condition) is false: what is wrong" says what is wrong.
std::string without_condition(std::string message) {
  constexpr const char* kEnd = ") is false: ";
  const size_t end = message.find(kEnd);
  if (message.find("heck failed: (") <= 10 && end != std::string::npos) {
    message.erase(0, end + std::char_traits<char>::length(kEnd));
  }
  while (!message.empty() && message.back() == '\n') message.pop_back();
  return message;
}

}  // namespace

void rethrow_as_complaint() {
  try {
    throw;
  } catch (const ArgumentError&) {
    throw;
  } catch (const WorkStopped&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const xgrammar::LogFatalError& error) {
    throw Complaint(without_condition(error.std::runtime_error::what()));
  } catch (const std::exception& error) {
    throw Complaint(without_condition(error.what()));
  }
}

}  // namespace openspec::library
