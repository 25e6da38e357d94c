# Whatever fails from here on gives the instance up at once: its group tries another one, and need not wait until the
# lifecycle hook's time is over. What failed is in the console's log.

about_me() {
    local service=http://169.254.169.254/latest token
    token=$(curl -sSf --max-time 5 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$service/api/token")
    curl -sSf --max-time 5 -H "X-aws-ec2-metadata-token: $token" "$service/meta-data/$1"
}

give_up() {
    local code=$?
    trap - ERR
    echo "nxpipe: this instance cannot be set up: line $1 ended with $code" >&2
    aws autoscaling complete-lifecycle-action --region "$REGION" --lifecycle-action-result ABANDON \
        --lifecycle-hook-name "$HOOK" --instance-id "$(about_me instance-id)" \
        --auto-scaling-group-name "$(about_me tags/instance/aws:autoscaling:groupName)"
    exit "$code"
}
trap 'give_up $LINENO' ERR

put() {
    mkdir -p "$(dirname "$1")"
    printf '%s' "$2" > "$1"
}
