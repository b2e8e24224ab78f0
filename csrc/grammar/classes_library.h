#pragma once

#include <xgrammar/compiler.h>
#include <xgrammar/tokenizer_info.h>

#include <cstdint>
#include <vector>

#include "grammar/compiled_grammar.h"
#include "grammar/vocabulary.h"

namespace openspec {

struct Vocabulary::Library {
  xgrammar::TokenizerInfo info;
};

struct CompiledGrammar::Library {
  xgrammar::CompiledGrammar grammar;
  std::vector<int32_t> tags = {};  // tokens that the grammar names as such, whatever their bytes
};

}  // namespace openspec
