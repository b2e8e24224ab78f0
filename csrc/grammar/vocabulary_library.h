#pragma once

#include <xgrammar/tokenizer_info.h>

#include "grammar/vocabulary.h"

namespace openspec {

struct Vocabulary::Library {
  xgrammar::TokenizerInfo info;
};

}  // namespace openspec
