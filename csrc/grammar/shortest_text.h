#pragma once

#include <xgrammar/compiler.h>

#include <cstdint>

namespace openspec {

/// Bytes that every text of a grammar may be longer than, at most: what a model could never finish
/// is no grammar for it.
inline constexpr int64_t kMostShortestBytes = int64_t{1} << 20;

/// Throws ArgumentError where a rule that can be reached has no text that ends, or where the
/// shortest text of the grammar has more than kMostShortestBytes bytes.
void check_texts_end(const xgrammar::CompiledGrammar& compiled);

}  // namespace openspec
