#pragma once

/// The C++ tests' own harness: no framework to download.
///
///   #include "check_test.h"
///   TEST(pool_returns_pages) { CHECK_EQ(pool.num_free(), 4); }
///
/// A failed check ends its test with file, line and values; the other tests still run. main() is
/// defined here, so include it from the one .cpp of the executable. Arguments choose tests by
/// substring of their names.

#include <cmath>
#include <cstdio>
#include <exception>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace check_test {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

template <typename T, typename = void>
struct is_printable : std::false_type {};
template <typename T>
struct is_printable<T, std::void_t<decltype(std::declval<std::ostream&>() << std::declval<T>())>>
    : std::true_type {};

template <typename T>
void print(std::ostream& out, const T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    out << (value ? "true" : "false");
  } else if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else if constexpr (sizeof(T) == 1 && std::is_integral_v<T>) {
    out << static_cast<int>(value);
  } else if constexpr (is_printable<T>::value) {
    out << value;
  } else {
    out << "<" << sizeof(T) << " bytes>";
  }
}

template <typename T>
void print(std::ostream& out, const std::vector<T>& values) {
  out << "{";
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) out << ", ";
    print(out, static_cast<T>(values[i]));
  }
  out << "}";
}

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename A, typename B>
[[noreturn]] void fail_comparison(const char* file, int line, const char* expression, const A& a,
                                  const B& b) {
  std::ostringstream what;
  what.precision(17);
  what << expression << "\n    left:  ";
  print(what, a);
  what << "\n    right: ";
  print(what, b);
  fail(file, line, what.str());
}

/// Integers of different signedness compare by value.
template <typename A, typename B>
bool equal(const A& a, const B& b) {
  if constexpr (std::is_integral_v<A> && std::is_integral_v<B> && !std::is_same_v<A, bool> &&
                !std::is_same_v<B, bool>) {
    return std::cmp_equal(a, b);
  } else {
    return a == b;
  }
}

template <typename A, typename B>
bool less(const A& a, const B& b) {
  if constexpr (std::is_integral_v<A> && std::is_integral_v<B> && !std::is_same_v<A, bool> &&
                !std::is_same_v<B, bool>) {
    return std::cmp_less(a, b);
  } else {
    return a < b;
  }
}

inline bool matches(const char* name, int argc, char** argv) {
  if (argc < 2) return true;
  for (int i = 1; i < argc; ++i) {
    if (std::string(name).find(argv[i]) != std::string::npos) return true;
  }
  return false;
}

inline int run_all(int argc, char** argv) {
  int num_passed = 0;
  int num_failed = 0;
  for (const Test& test : tests()) {
    if (!matches(test.name, argc, argv)) continue;
    std::string error;
    try {
      test.body();
    } catch (const Failure& failure) {
      error = failure.what();
    } catch (const std::exception& exception) {
      error = std::string("exception: ") + exception.what();
    } catch (...) {
      error = "exception of unknown type";
    }
    ++(error.empty() ? num_passed : num_failed);
    if (!error.empty()) std::printf("FAILED %s\n  %s\n", test.name, error.c_str());
  }
  std::printf("%d passed, %d failed\n", num_passed, num_failed);
  return num_failed == 0 && num_passed > 0 ? 0 : 1;
}

}  // namespace check_test

#define TEST(test_name)                                                                         \
  static void test_##test_name();                                                               \
  static const check_test::Registration registration_##test_name(#test_name, test_##test_name); \
  static void test_##test_name()

#define FAIL(message) check_test::fail(__FILE__, __LINE__, message)

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) check_test::fail(__FILE__, __LINE__, "CHECK(" #condition ")"); \
  } while (false)

// Each argument is evaluated once, and copied: `f()[0]` would outlive what f returned.
#define CHECK_COMPARISON_(a, b, holds, expression)                                   \
  do {                                                                               \
    const auto check_a = (a);                                                        \
    const auto check_b = (b);                                                        \
    if (!(holds)) {                                                                  \
      check_test::fail_comparison(__FILE__, __LINE__, expression, check_a, check_b); \
    }                                                                                \
  } while (false)

#define CHECK_EQ(a, b) CHECK_COMPARISON_(a, b, check_test::equal(check_a, check_b), #a " == " #b)
#define CHECK_NE(a, b) CHECK_COMPARISON_(a, b, !check_test::equal(check_a, check_b), #a " != " #b)
#define CHECK_LT(a, b) CHECK_COMPARISON_(a, b, check_test::less(check_a, check_b), #a " < " #b)
#define CHECK_LE(a, b) CHECK_COMPARISON_(a, b, !check_test::less(check_b, check_a), #a " <= " #b)
#define CHECK_GT(a, b) CHECK_COMPARISON_(a, b, check_test::less(check_b, check_a), #a " > " #b)
#define CHECK_GE(a, b) CHECK_COMPARISON_(a, b, !check_test::less(check_a, check_b), #a " >= " #b)

/// |a - b| <= tolerance; NaN never passes.
#define CHECK_NEAR(a, b, tolerance) \
  CHECK_COMPARISON_(a, b, std::abs(check_a - check_b) <= (tolerance), #a " ~ " #b)

/// The statement throws `exception_type` and its message contains `text` ("" for any).
#define CHECK_THROWS(statement, exception_type, text)                                        \
  do {                                                                                       \
    std::string check_message;                                                               \
    bool check_thrown = false;                                                               \
    try {                                                                                    \
      statement;                                                                             \
    } catch (const exception_type& check_exception) {                                        \
      check_thrown = true;                                                                   \
      check_message = check_exception.what();                                                \
    }                                                                                        \
    if (!check_thrown) FAIL("no " #exception_type " from " #statement);                      \
    if (check_message.find(text) == std::string::npos) {                                     \
      FAIL("the message of " #statement " is \"" + check_message + "\", without " + (text)); \
    }                                                                                        \
  } while (false)

int main(int argc, char** argv) { return check_test::run_all(argc, argv); }
