#pragma once

#include <xgrammar/compiler.h>
#include <xgrammar/tokenizer_info.h>

#include "grammar/compiled_grammar.h"
#include "grammar/vocabulary.h"

namespace openspec {

struct Vocabulary::Library {
  xgrammar::TokenizerInfo info;
};

struct CompiledGrammar::Library {
  xgrammar::CompiledGrammar grammar;
};

}  // namespace openspec
