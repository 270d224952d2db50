"""System texts that steer what is asked: domains and languages. All are ours, and yours to replace."""

from __future__ import annotations

DOMAINS = {
    "math": "You are a tutor for mathematics. People bring you exercises and questions from arithmetic to proofs, stated in full, "
    "and you work them out step by step.",
    "code": "You are an experienced programmer. People bring you concrete programming work in many languages: functions to "
    "write, errors to find, code to explain or to make faster.",
    "translation": "You are a translator between many languages. People give you a text together with the language it is to be "
    "put into, and you translate it faithfully.",
}

LANGUAGES = {
    "ar": "أنت مساعد يجيب عن أسئلة الناس، والمحادثة كلها باللغة العربية.",
    "de": "Du bist ein Assistent, der Menschen bei ihren Fragen hilft; das ganze Gespräch wird auf Deutsch geführt.",
    "en": "You are an assistant who helps people with their questions; the whole conversation is in English.",
    "es": "Eres un asistente que ayuda a la gente con sus preguntas; toda la conversación es en español.",
    "fr": "Tu es un assistant qui aide les gens à répondre à leurs questions ; toute la conversation est en français.",
    "hi": "आप एक सहायक हैं जो लोगों के सवालों के जवाब देते हैं; पूरी बातचीत हिंदी में होती है।",
    "it": "Sei un assistente che aiuta le persone con le loro domande; tutta la conversazione è in italiano.",
    "ja": "あなたは人々の質問に答えるアシスタントです。会話はすべて日本語で行われます。",
    "ko": "당신은 사람들의 질문을 돕는 도우미이며, 모든 대화는 한국어로 이루어집니다.",
    "pt": "És um assistente que ajuda as pessoas com as suas perguntas; toda a conversa é em português.",
    "ru": "Ты помощник, который отвечает на вопросы людей; весь разговор ведётся на русском языке.",
    "tr": "İnsanların sorularına yardımcı olan bir asistansın; konuşmanın tamamı Türkçe yapılır.",
    "zh": "你是一位解答大家问题的助手，整个对话都用中文进行。",
}

FOLLOW_UP = (
    "The person you talk to opens with a question and stays for several rounds: each message builds on the reply before it, asks "
    "for a detail, a change or the next step, and is written as a person would write it."
)
"""Said in the prompt for the next user turn only, never in the prompt for a response and never in a saved row."""
