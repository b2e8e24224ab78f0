#include <vector>

#include "check_test.h"

TEST(comparisons_hold) {
  CHECK(true);
  CHECK_EQ(std::vector<int>({1, 2}), std::vector<int>({1, 2}));
  CHECK_EQ(3u, 3);
  CHECK_NE(-1, 4294967295u);
  CHECK_LT(-1, 0u);
  CHECK_LE(2, 2);
  CHECK_GT(0u, -1);
  CHECK_GE(2.5, 2.5);
  CHECK_NEAR(1.0, 1.0 + 1e-9, 1e-6);
}

TEST(a_failure_says_where_and_what) {
  CHECK_THROWS(CHECK_EQ(std::vector<int>({1, 2}), std::vector<int>({1, 3})), check_test::Failure,
               "right: {1, 3}");
  CHECK_THROWS(CHECK_LT(2, 1), check_test::Failure, "check_self_test.cpp:");
  CHECK_THROWS(CHECK_NEAR(std::nan(""), 0.0, 1.0), check_test::Failure, "nan");
}

TEST(a_missing_exception_fails) {
  CHECK_THROWS(CHECK_THROWS((void)0, check_test::Failure, ""), check_test::Failure, "no ");
}
